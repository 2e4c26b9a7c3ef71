"""What all queues of items have in common: life, options, taking by hand."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from celery_dq.clock import Clock, SystemClock
from celery_dq.curator.consumer import Consumer
from celery_dq.curator.decoder import Decoder
from celery_dq.curator.feed import Feed
from celery_dq.curator.framing import frame
from celery_dq.curator.holding import Deleting, Holding, Locking
from celery_dq.curator.intake import Intake
from celery_dq.curator.names import Grammar
from celery_dq.curator.received import Received
from celery_dq.curator.serializing import Serializer, serializer_of
from celery_dq.curator.writer import Listener, Put, Writer
from celery_dq.errors import ConfigurationError, QueueEmpty
from celery_dq.znodes import JOURNALS
from celery_dq.zookeeper.journal import Journal
from celery_dq.zookeeper.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Base", "check_path"]

logger = logging.getLogger(__name__)

#: Nodes that a consumer holds at most: under locks, without them, and with an executor.
PREFETCH_LOCKED = 100
PREFETCH_UNLOCKED = 1
PREFETCH_EXECUTOR = 16

Queue = TypeVar("Queue", bound="Base")


class _Own:
    """What belongs to one process: threads and sessions do not survive a fork."""

    def __init__(self, queue: Base) -> None:
        self.pid = os.getpid()
        self.bell = threading.Event()
        #: Who takes; the feed belongs to one thread at a time.
        self.turn = threading.Lock()
        self.journal = Journal(queue.session, JOURNALS, clock=queue.clock)
        #: Its own, because a thread in the background may be busy with it for as long as ZooKeeper is away.
        self.puts = Journal(queue.session, JOURNALS, clock=queue.clock)
        self.writer = Writer(
            queue.session,
            queue.path,
            self.puts,
            queue.clock,
            max_items=queue.max_items,
            background=queue.put_in_background,
        )
        self.holding: Holding
        if queue.lock_path is None:
            self.holding = Deleting(
                queue.session, queue.path, queue.grammar, self.journal, queue.decoder, queue.timeout_s
            )
        else:
            self.holding = Locking(
                queue.session, queue.path, queue.lock_path, queue.grammar, queue.decoder, queue.timeout_s
            )
        feed = Feed(
            queue.session,
            queue.path,
            queue.grammar,
            queue.clock,
            self.bell.set,
            timeout_s=queue.timeout_s,
            min_items=queue.min_items_before_refresh,
        )
        self.intake = Intake(queue.session, feed, self.holding, self.bell)
        self.consumer: Consumer | None = None
        self.listening = False


class Base:
    """What the four kinds have in common. A context manager: :meth:`start` and :meth:`close`.

    :param zookeeper: a :class:`~celery_dq.zookeeper.session.Session`, or a list of hosts
        (``host:2181,host:2181/chroot``) for a session of the queue's own.
    :param path: the folder of the queue. One folder holds one kind of queue.
    :param consumer: called with each item; None (default): nothing consumes, but :meth:`poll` and :meth:`get`
        may.
    :param serializer: ``"json"`` (default), ``"text"``, ``"bytes"``, or an object with ``serialize(item)``
        and ``deserialize(bytes)``.
    :param lock_path: the folder of the locks, another one than `path`. An item is locked while it is
        consumed and deleted afterwards, so that it survives its consumer. None (default): it is deleted first
        and lost with its consumer, as in Curator. All consumers of a queue must say the same.
    :param on_failure: ``"requeue"`` (default): an item whose consumer raises is put back last in line, with
        its id, priority or due time; ``"delete"``: it is deleted.
    :param max_items: nodes that the queue may hold; ``put`` waits for room. Default None: any number.
    :param put_in_background: ``put`` returns at once, a thread sends; see :meth:`flush`. Default False.
    :param executor: calls the consumer, several times at once; it must use threads. Default None: one after
        the other, in a thread of the queue.
    :param prefetch: nodes that are held at most; default 100 under locks (fewer, as the consumer is slow), 1
        without, 16 with an executor.
    :param timeout_s: seconds to wait for ZooKeeper and for room; default 10.
    :param final_flush_s: seconds that :meth:`close` waits for what was put in the background; default 5.
    """

    grammar: ClassVar[Grammar]
    #: Whether the data of a node is framed as in Curator.
    framed: ClassVar[bool] = True

    def __init__(
        self,
        zookeeper: Session | str,
        path: str,
        *,
        consumer: Callable[[Any], Any] | None = None,
        serializer: Serializer | str = "json",
        lock_path: str | None = None,
        on_failure: str = "requeue",
        max_items: int | None = None,
        put_in_background: bool = False,
        executor: Executor | None = None,
        prefetch: int | None = None,
        timeout_s: float = 10.0,
        final_flush_s: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        check_path("path", path)
        if lock_path is not None:
            check_path("lock_path", lock_path)
            if lock_path == path:
                raise ConfigurationError(f"lock_path = {lock_path!r} is the queue's path: give another one")
        if on_failure not in {"requeue", "delete"}:
            raise ConfigurationError(f"on_failure = {on_failure!r} is unknown: 'requeue' or 'delete'")
        for name, value in (("max_items", max_items), ("prefetch", prefetch)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name} = {value!r} is unusable: give a number from 1 on, or None")
        self._owns_session = isinstance(zookeeper, str)
        self.session = Session(zookeeper) if isinstance(zookeeper, str) else zookeeper
        self.path = path
        self.lock_path = lock_path
        self.max_items = max_items
        self.put_in_background = put_in_background
        self.timeout_s = timeout_s
        self.clock = clock or SystemClock()
        self.min_items_before_refresh = 0
        self.serializer = serializer_of(serializer)
        self.decoder = Decoder(path, self.serializer, framed=self.framed)
        self.requeues = on_failure == "requeue"
        self._consume = consumer
        self._executor = executor
        self._prefetch = prefetch
        self._final_flush_s = final_flush_s
        self._mine: _Own | None = None
        self._listeners: list[Listener] = []

    # -- life

    def start(self) -> Self:
        """Begin to consume, if there is a consumer. After a fork, the child must say so again."""
        own = self._own()
        if self._consume is not None and own.consumer is None:
            own.consumer = Consumer(
                own.intake,
                own.holding,
                self.decoder,
                self._consume,
                own.bell,
                name=self.path,
                requeue=self.requeues,
                executor=self._executor,
                prefetch=self._room(),
                clock=self.clock,
            )
            own.consumer.start()
        return self

    def close(self, timeout_s: float = 10.0) -> None:
        """Consume nothing more, finish what runs, send what was put in the background.

        :param timeout_s: seconds to wait for a consumer that runs.

        Raises:
            ZooKeeperUnreachable: Not all that was put in the background could be sent; :meth:`unsent` has it.
        """
        own = self._own()
        consumer, own.consumer = own.consumer, None
        if consumer is not None and not consumer.stop(timeout_s):
            logger.warning(
                "A consumer of %s did not end within %g s: its item stays locked until the session ends, "
                "and is consumed again",
                self.path,
                timeout_s,
            )
        if own.listening:
            own.intake.stop()
            own.listening = False
        try:
            own.writer.close(self._final_flush_s)
        finally:
            own.puts.close()
            own.journal.close()
            own.holding.close()
            if self._owns_session:
                self.session.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- put

    def on_put(self, listener: Listener) -> None:
        """Call `listener` with the list of the items of each node that was put, once it is in ZooKeeper."""
        self._listeners.append(listener)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put in the background is there; False: it is not after `timeout_s`."""
        return self._own().writer.flush(timeout_s)

    def unsent(self) -> list[Any]:
        """The items that were put in the background and are not known to be there."""
        return self._own().writer.unsent()

    def _put(self, prefix: str, nodes: Sequence[Sequence[Any]], timeout_s: float | None) -> None:
        """Create a node for each list of items."""
        serialize = self.serializer.serialize
        puts = [Put(prefix, frame([serialize(item) for item in items]), list(items)) for items in nodes]
        self._own().writer.put(puts, self.timeout_s if timeout_s is None else timeout_s)

    # -- take

    def poll(self, timeout_s: float = 0.0) -> Received | None:
        """The next node, held until it is finished; None when there is none for `timeout_s` seconds."""
        return self._next(timeout_s)

    def get(self, timeout_s: float | None = None) -> Received:
        """The next node, held until it is finished.

        :param timeout_s: seconds to wait; None (default): for ever.

        Raises:
            QueueEmpty: There was none.
        """
        received = self._next(timeout_s)
        if received is None:
            raise QueueEmpty(f"{self.path} had nothing to serve for {timeout_s:g} s")
        return received

    def peek(self) -> list[Any] | None:
        """The items of a node that would be next, unheld; None when there is none that is due and free."""
        with self._own().turn:
            node = self._intake().peek()
        return None if node is None else self.decoder.items(node.data)

    def size(self) -> int:
        """How many nodes the queue holds: waiting, delayed and locked ones."""
        stat = self.session.ask(lambda client: client.exists_async(self.path), self.timeout_s)
        return 0 if stat is None else int(stat.numChildren)

    # -- inside

    def _own(self) -> _Own:
        own = self._mine
        if own is None or own.pid != os.getpid():
            own = self._mine = _Own(self)
            own.writer.listen(self._told)
        return own

    def _told(self, items: Sequence[Any]) -> None:
        for listener in tuple(self._listeners):
            listener(items)

    def _intake(self) -> Intake:
        own = self._own()
        if self._consume is not None:
            raise ConfigurationError(f"the queue at {self.path} has a consumer: poll one that has none")
        if not own.listening:
            own.intake.start()
            own.listening = True
        return own.intake

    def _next(self, timeout_s: float | None) -> Received | None:
        own = self._own()
        deadline = math.inf if timeout_s is None else self.clock.monotonic() + timeout_s
        if not own.turn.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return None
        try:
            left = None if timeout_s is None else max(0.0, deadline - self.clock.monotonic())
            nodes = self._intake().take_within(1, left, self.clock)
        finally:
            own.turn.release()
        if not nodes:
            return None
        return Received(nodes[0], own.holding, own.intake, self.decoder, requeues=self.requeues)

    def _room(self) -> int:
        if self._prefetch is not None:
            room = self._prefetch
        elif self.lock_path is None:
            room = PREFETCH_UNLOCKED
        else:
            room = PREFETCH_LOCKED
        if self._executor is not None and self._prefetch is None:
            room = PREFETCH_EXECUTOR
        if self.grammar.reorders and not self.grammar.delays:
            # What is held has left the order.
            room = min(room, max(1, self.min_items_before_refresh))
        return room


def check_path(name: str, path: str) -> None:
    """Raise :exc:`~celery_dq.errors.ConfigurationError` for a path that is not one of a folder of its own."""
    parts = path.split("/")[1:] if isinstance(path, str) else []
    if not parts or not path.startswith("/") or any(part in {"", ".", ".."} for part in parts):
        raise ConfigurationError(
            f"{name} = {path!r} is unusable: give an absolute one such as '/queues/mail'"
        )
