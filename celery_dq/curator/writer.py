"""Creating the nodes of a queue: each once, with an optional bound, optionally in the background."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NoNodeError

from celery_dq.curator.item_ownership import QueueFolder
from celery_dq.daemon_threads import start_daemon
from celery_dq.errors import DQError, QueueClosed, QueueFull, ZooKeeperUnreachable
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger
from celery_dq.zookeeper.idempotent_writer import IdempotentWriter
from celery_dq.zookeeper.transaction import MAX_REQUEST, TransactionRefused, check_size, create, failure_of

__all__ = ["Listener", "Put", "Writer"]

logger = shown_logger(__name__)

#: Maximum number of puts that wait in the background; beyond that, ``put`` waits.
MAX_BACKLOG = 10_000
#: Maximum bytes of a put in the background; the rest of a request is for the data that is sent with it.
SAFE_SIZE = MAX_REQUEST - 1024
#: Maximum number of puts that the background thread sends together.
TOGETHER = 500
#: Seconds until the background thread tries refused puts again.
RETRY_S = 0.5
#: Maximum seconds to wait for the end of the background thread.
GIVE_UP_S = 4.0

Listener = Callable[[Sequence[Any]], Any]


class Put(NamedTuple):
    """One node to create.

    Attributes:
        prefix: Its name up to the sequence.
        data: Its data.
        items: The items in it, for the listeners.
    """

    prefix: str
    data: bytes
    items: Sequence[Any]


class Writer:
    """Creates the nodes of one queue. Thread-safe.

    Args:
        folder: The folder of the queue.
        writer: Commits each transaction once.
        max_items: Maximum number of nodes in the queue; None means no limit. Several producers may exceed it
            by the nodes that they put at the same moment.
        background: Whether :meth:`put` returns before the nodes are created.
        listeners: Each is called after each node is created, with its items.
    """

    def __init__(
        self,
        folder: QueueFolder,
        writer: IdempotentWriter,
        *,
        max_items: int | None,
        background: bool,
        listeners: Iterable[Listener],
    ) -> None:
        self._session, self._path, self._clock = folder.session, folder.path, folder.clock
        self._outage = Outage(logger, "curator_put")
        self._idempotent_writer = writer
        self._max_items = max_items
        self._background = background
        self._listeners = listeners
        self._room = threading.Lock()
        self._change = threading.Condition()
        self._backlog: deque[Put] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._given_up = False
        self._made = False

    def put(self, puts: Sequence[Put], timeout_s: float) -> None:
        """Create nodes, in order.

        Args:
            puts: The nodes.
            timeout_s: Seconds to wait for room and for ZooKeeper.

        Raises:
            QueueFull: The queue stayed full for `timeout_s` seconds; the remaining nodes were not put.
            ZooKeeperUnreachable: ZooKeeper did not answer; some nodes may have been put.
            MessageTooLarge: A node is too large; no node was put.
            QueueClosed: The queue was closed.
        """
        if self._closed:
            raise QueueClosed(f"the queue at {self._path} was closed: open a new queue to put items")
        deadline = self._clock.monotonic() + timeout_s
        if self._background:
            for each in puts:
                check_size([create(f"{self._path}/{each.prefix}", each.data, sequence=True)], limit=SAFE_SIZE)
            self._defer(puts, deadline)
        elif self._max_items is None:
            raise_first(self._create(puts, timeout_s))
        else:
            with self._room:
                rest = list(puts)
                while rest:
                    free = self._await_room(deadline)
                    left = max(1.0, deadline - self._clock.monotonic())
                    raise_first(self._create(rest[:free], left))
                    rest = rest[free:]

    def flush(self, timeout_s: float) -> bool:
        """Wait until all puts in the background are in ZooKeeper; return False if `timeout_s` has passed."""
        deadline = self._clock.monotonic() + timeout_s
        with self._change:
            while self._backlog:
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    return False
                self._change.wait(left)
        return True

    def unsent(self) -> list[Any]:
        """Return the items of puts in the background that are not confirmed."""
        with self._change:
            return [item for each in self._backlog for item in each.items]

    def close(self, timeout_s: float) -> None:
        """Flush the puts in the background, and end the thread.

        Raises:
            ZooKeeperUnreachable: Some could not be sent within `timeout_s` seconds; :meth:`unsent` returns
                their items.
        """
        flushed = self.flush(timeout_s)
        self._closed = True
        self._given_up = not flushed
        if not flushed:
            self._idempotent_writer.give_up()
        with self._change:
            thread = self._thread
            self._change.notify_all()
        if thread is not None:
            thread.join(GIVE_UP_S)
        left = len(self.unsent())
        if left:
            raise ZooKeeperUnreachable(
                f"{left} items for {self._path} were not sent within {timeout_s:g} s, or no answer came: "
                "unsent() returns them"
            )

    # -- inside

    def _create(self, puts: Sequence[Put], timeout_s: float) -> list[DQError | None]:
        """Create nodes; return for each None, or the error that prevented it."""
        if not self._made:
            self._make()
            self._made = True
        errors = self._commit(puts, timeout_s)
        missing = [at for at, error in enumerate(errors) if is_missing(error)]
        if missing:
            # The folder was an empty container that the server has deleted.
            self._make()
            again = self._commit([puts[at] for at in missing], timeout_s)
            for at, error in zip(missing, again, strict=True):
                errors[at] = error
        for each, error in zip(puts, errors, strict=True):
            if error is None:
                self._notify_listeners(each)
        return errors

    def _commit(self, puts: Sequence[Put], timeout_s: float) -> list[DQError | None]:
        transactions = [[create(f"{self._path}/{each.prefix}", each.data, sequence=True)] for each in puts]
        outcomes = self._idempotent_writer.commit_each(transactions, timeout_s)
        return [outcome if isinstance(outcome, DQError) else None for outcome in outcomes]

    def _make(self) -> None:
        try:
            self._session.ask(lambda client: client.ensure_path_async(self._path), 10.0)
        except KazooException as error:
            raise failure_of("create", self._path, error) from None

    def _notify_listeners(self, put: Put) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(put.items)
            except Exception:  # noqa: PERF203 - a handful of listeners
                logger.exception(
                    "A put listener of queue %s raised an error; the node was created.",
                    self._path,
                    extra={"event": "curator_put_listener_failed"},
                )

    def _await_room(self, deadline: float) -> int:
        """Wait until the queue has room; return the number of nodes that fit."""
        assert self._max_items is not None
        while True:
            left = deadline - self._clock.monotonic()
            stat = self._session.ask(lambda client: client.exists_async(self._path), max(left, 1.0))
            if stat is None:
                return self._max_items
            if stat.numChildren < self._max_items:
                return int(self._max_items - stat.numChildren)
            if left <= 0:
                raise QueueFull(
                    f"queue {self._path} holds {stat.numChildren} nodes, max_items = {self._max_items}: wait "
                    "longer, or consume faster"
                )
            changed = threading.Event()
            names = self._session.ask(self._watching(changed), max(left, 1.0))
            if len(names) >= self._max_items:
                changed.wait(left)

    def _watching(self, changed: threading.Event) -> Callable[[Any], Any]:
        return lambda client: client.get_children_async(self._path, watch=lambda _event: changed.set())

    def _defer(self, puts: Sequence[Put], deadline: float) -> None:
        with self._change:
            if self._thread is None:
                self._thread = start_daemon(self._send, f"dq-put-{self._path}")
            for put in puts:
                while len(self._backlog) >= MAX_BACKLOG:
                    left = deadline - self._clock.monotonic()
                    if left <= 0:
                        raise QueueFull(f"{MAX_BACKLOG} puts to {self._path} wait for ZooKeeper: wait longer")
                    self._change.wait(left)
                self._backlog.append(put)
            self._change.notify_all()

    def _send(self) -> None:
        while True:
            with self._change:
                while not self._backlog and not self._closed:
                    self._change.wait()
                if not self._backlog or self._given_up:
                    return
                batch = [self._backlog[at] for at in range(min(TOGETHER, len(self._backlog)))]
            try:
                left = self._send_some(batch)
            except (DQError, KazooException) as error:
                self._outage.began("Puts to queue %s wait and are tried again: %s.", self._path, error)
                left = batch
            with self._change:
                for _each in batch:
                    self._backlog.popleft()
                self._backlog.extendleft(reversed(left))
                self._change.notify_all()
                if left and not self._given_up:
                    self._change.wait(RETRY_S)

    def _send_some(self, batch: list[Put]) -> list[Put]:
        """Create the nodes for which the queue has room; return the nodes that remain."""
        count = len(batch)
        if self._max_items is not None:
            try:
                count = min(count, self._await_room(self._clock.monotonic() + RETRY_S))
            except QueueFull:
                return batch
        # Without a timeout: a node given up after a lost answer may exist, and would be created twice.
        errors = self._create(batch[:count], math.inf)
        for error in errors:
            if error is not None:
                self._outage.began("Puts to queue %s wait and are tried again: %s.", self._path, error)
                break
        else:
            if errors:
                self._outage.over("Puts to queue %s continue.", self._path)
        failed = [each for each, error in zip(batch[:count], errors, strict=True) if error is not None]
        return failed + batch[count:]


def is_missing(error: DQError | None) -> bool:
    """Whether the error means that the folder is missing."""
    return isinstance(error, TransactionRefused) and isinstance(error.error, NoNodeError)


def raise_first(errors: Sequence[DQError | None]) -> None:
    """Raise the first error, if there is any."""
    for error in errors:
        if isinstance(error, TransactionRefused):
            raise failure_of("create", error.step.path, error.error)
        if error is not None:
            raise error
