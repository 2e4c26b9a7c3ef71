"""Putting nodes into a queue: each once, with bounds, in the background if wanted."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NoNodeError

from celery_dq.clock import Clock
from celery_dq.errors import DQError, QueueClosed, QueueFull, ZooKeeperUnreachable
from celery_dq.zookeeper.journal import Journal
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import MAX_REQUEST, Refused, check_size, create, denied

__all__ = ["Listener", "Put", "Writer"]

logger = logging.getLogger(__name__)

#: Puts that wait in the background at most; beyond, ``put`` waits.
MAX_BACKLOG = 10_000
#: Bytes of a request that are surely not too many once it is sent, with all that travels along.
SAFE_SIZE = MAX_REQUEST - 1024
#: Puts that the background thread sends together at most.
TOGETHER = 500
#: Seconds until the background thread tries again what was refused.
RETRY_S = 0.5
#: Seconds that the thread may take to notice that it shall give up.
GIVE_UP_S = 4.0

Listener = Callable[[Sequence[Any]], Any]


class Put(NamedTuple):
    """One node to create: its name up to the sequence, its data, and the items in it for the listeners."""

    prefix: str
    data: bytes
    items: Sequence[Any]


class Writer:
    """Creates the nodes of one queue. Thread-safe.

    :param path: the folder of the queue; made when it is missing.
    :param max_items: nodes that the queue may hold; None: any number. Several producers may exceed it by what
        they put at the same moment.
    :param background: whether :meth:`put` returns before the nodes are created.
    """

    def __init__(
        self,
        session: Session,
        path: str,
        journal: Journal,
        clock: Clock,
        *,
        max_items: int | None,
        background: bool,
    ) -> None:
        self._session = session
        self._path = path
        self._journal = journal
        self._clock = clock
        self._max_items = max_items
        self._background = background
        self._listeners: list[Listener] = []
        self._room = threading.Lock()
        self._change = threading.Condition()
        self._backlog: deque[Put] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._given_up = False
        self._made = False

    def listen(self, listener: Listener) -> None:
        """Call `listener` with the items of each node that was put."""
        self._listeners.append(listener)

    def put(self, puts: Sequence[Put], timeout_s: float) -> None:
        """Create nodes, in order.

        Raises:
            QueueFull: There was no room within `timeout_s`; none of the rest was put.
            ZooKeeperUnreachable: Nobody answered; some may have been put.
            MessageTooLarge: One is too large; none was put.
        """
        if self._closed:
            raise QueueClosed(f"the queue at {self._path} was closed: nothing can be put")
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
        """Wait until all that was put in the background is there; False: it is not after `timeout_s`."""
        deadline = self._clock.monotonic() + timeout_s
        with self._change:
            while self._backlog:
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    return False
                self._change.wait(left)
        return True

    def unsent(self) -> list[Any]:
        """The items that were put in the background and are not known to be there."""
        with self._change:
            return [item for each in self._backlog for item in each.items]

    def close(self, timeout_s: float) -> None:
        """Flush, and stop.

        Raises:
            ZooKeeperUnreachable: Not all could be sent in `timeout_s` seconds; :meth:`unsent` has the items.
        """
        flushed = self.flush(timeout_s)
        self._closed = True
        self._given_up = not flushed
        if not flushed:
            self._journal.give_up()
        with self._change:
            thread = self._thread
            self._change.notify_all()
        if thread is not None:
            thread.join(GIVE_UP_S)
        left = len(self.unsent())
        if left:
            raise ZooKeeperUnreachable(
                f"{left} items for {self._path} were not sent within {timeout_s:g} s, or no answer came: "
                "unsent() has them"
            )

    # -- inside

    def _create(self, puts: Sequence[Put], timeout_s: float) -> list[DQError | None]:
        """Create nodes; for each None, or why it is not there."""
        if not self._made:
            self._make()
            self._made = True
        errors = self._commit(puts, timeout_s)
        missing = [at for at, error in enumerate(errors) if is_missing(error)]
        if missing:
            # A container that its server removed because it was empty.
            self._make()
            again = self._commit([puts[at] for at in missing], timeout_s)
            for at, error in zip(missing, again, strict=True):
                errors[at] = error
        for each, error in zip(puts, errors, strict=True):
            if error is None:
                self._tell(each)
        return errors

    def _commit(self, puts: Sequence[Put], timeout_s: float) -> list[DQError | None]:
        transactions = [[create(f"{self._path}/{each.prefix}", each.data, sequence=True)] for each in puts]
        outcomes = self._journal.commit_each(transactions, timeout_s)
        return [outcome if isinstance(outcome, DQError) else None for outcome in outcomes]

    def _make(self) -> None:
        try:
            self._session.ask(lambda client: client.ensure_path_async(self._path), 10.0)
        except KazooException as error:
            raise denied("create", self._path, error) from None

    def _tell(self, put: Put) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(put.items)
            except Exception:  # noqa: PERF203 - a handful of listeners
                logger.exception("A listener of puts failed.")

    def _await_room(self, deadline: float) -> int:
        """Wait until the queue has room; returns for how many."""
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
                    f"{self._path} holds {stat.numChildren} nodes, max_items = {self._max_items}: wait "
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
                self._thread = threading.Thread(target=self._send, name=f"dq-put-{self._path}", daemon=True)
                self._thread.start()
            for each in puts:
                while len(self._backlog) >= MAX_BACKLOG:
                    left = deadline - self._clock.monotonic()
                    if left <= 0:
                        raise QueueFull(
                            f"{MAX_BACKLOG} puts wait for ZooKeeper, for {self._path}: wait longer"
                        )
                    self._change.wait(left)
                self._backlog.append(each)
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
                logger.warning("Puts to %s wait: %s", self._path, error)
                left = batch
            with self._change:
                for _each in batch:
                    self._backlog.popleft()
                self._backlog.extendleft(reversed(left))
                self._change.notify_all()
                if left and not self._given_up:
                    self._change.wait(RETRY_S)

    def _send_some(self, batch: list[Put]) -> list[Put]:
        """Create what there is room for; returns what is still to be created."""
        count = len(batch)
        if self._max_items is not None:
            try:
                count = min(count, self._await_room(self._clock.monotonic() + RETRY_S))
            except QueueFull:
                return batch
        # Without an end: what is given up after a silence may be there, and would be put twice.
        errors = self._create(batch[:count], math.inf)
        for error in errors:
            if error is not None:
                logger.warning("Puts to %s wait: %s", self._path, error)
                break
        failed = [each for each, error in zip(batch[:count], errors, strict=True) if error is not None]
        return failed + batch[count:]


def is_missing(error: DQError | None) -> bool:
    """Whether the folder was not there."""
    return isinstance(error, Refused) and isinstance(error.error, NoNodeError)


def raise_first(errors: Sequence[DQError | None]) -> None:
    """Raise what went wrong first, if anything did."""
    for error in errors:
        if isinstance(error, Refused):
            raise denied("create", error.step.path, error.error)
        if error is not None:
            raise error
