"""The kinds of queues, and their common base: options, start and close, and taking single nodes.

A queue holds items alone, or with ids, priorities or due times; or bytes as in Java's collections.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from celery_dq.clock import Clock, SystemClock
from celery_dq.curator.consumer import Consumer
from celery_dq.curator.framing import Decoder, Serializer, frame, serializer_of
from celery_dq.curator.item_ownership import (
    DeletedOwnership,
    ItemOwnership,
    LockedOwnership,
    Node,
    QueueFolder,
)
from celery_dq.curator.names import (
    DELAY,
    ID,
    PLAIN,
    PRIORITY,
    QUEUE,
    SIMPLE,
    Grammar,
    delay_prefix,
    id_of,
    id_prefix,
    priority_prefix,
)
from celery_dq.curator.taking import ItemTaker
from celery_dq.curator.writer import Listener, Put, Writer
from celery_dq.errors import ConfigurationError, InvalidMessage, QueueEmpty
from celery_dq.per_process import PerProcess
from celery_dq.shown import shown_logger
from celery_dq.znodes import JOURNALS, ROOT
from celery_dq.zookeeper.idempotent_writer import IdempotentWriter
from celery_dq.zookeeper.item_locks import FinishOutcome
from celery_dq.zookeeper.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

logger = shown_logger(__name__)

#: Default of `prefetch` with locks.
PREFETCH_LOCKED = 100
#: Default of `prefetch` without locks.
PREFETCH_UNLOCKED = 1
#: Default of `prefetch` with an executor.
PREFETCH_EXECUTOR = 16

Queue = TypeVar("Queue", bound="CuratorQueue")


class LeasedItem:
    """The items of a node that :meth:`CuratorQueue.poll` or :meth:`CuratorQueue.get` has taken.

    The node is held until :meth:`finish`, :meth:`requeue` or :meth:`release` is called. A later call of any
    of them does nothing, and returns the result of the first one.

    As a context manager, it finishes the node at the end of the block. If the block raises, it finishes or
    requeues the node according to the queue's ``on_failure``.

    Attributes:
        items: The items of the node; one item unless they were put with ``put_multi``.
    """

    def __init__(
        self, node: Node, holding: ItemOwnership, item_taker: ItemTaker, decoder: Decoder, *, requeues: bool
    ) -> None:
        self._node = node
        self._ownership = holding
        self._item_taker = item_taker
        self._requeues = requeues
        #: The result of the call that has ended the ownership of the node.
        self._result: bool | None = None
        self._raw = decoder.raw(node.data)
        self.items: list[Any] = decoder.items(node.data)

    @property
    def item(self) -> Any:
        """The first item; the only one unless the items were put with ``put_multi``."""
        return self.items[0]

    @property
    def name(self) -> str:
        """The name of the node."""
        return self._node.name

    def finish(self) -> bool:
        """Delete the node as consumed.

        Returns:
            False if the session had expired and another consumer has the node, so that it is consumed twice.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        return self._end(lambda: self._ownership.finish([self._node])[0])

    def requeue(self) -> bool:
        """Move the node to the end of the queue, with its id, priority or due time.

        Returns:
            As :meth:`finish`.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        return self._end(lambda: self._ownership.requeue(self._node, frame(self._raw)))

    def release(self) -> None:
        """Return the node to its old place, or without locks to the end of the queue.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        if self._result is None:
            self._ownership.release([self._node])
            self._result = True
            self._item_taker.release([self._node])

    def _end(self, request: Callable[[], FinishOutcome]) -> bool:
        if self._result is None:
            outcome = request()
            self._result = outcome is not FinishOutcome.LOST
            self._item_taker.settle([self._node], [outcome])
        return self._result

    def __enter__(self) -> LeasedItem:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, Exception) and not self._requeues):
            self.finish()
        else:
            self.requeue()

    def __repr__(self) -> str:
        return f"<Received {self._node.name} {self.items!r:.100}>"


class _ProcessQueue:
    """The state of one process: threads and sessions do not survive a fork."""

    def __init__(self, queue: CuratorQueue) -> None:
        self.wake_event = threading.Event()
        #: Held by the thread that takes nodes; only one thread at a time may use the listing.
        self.turn = threading.Lock()
        folder = QueueFolder(
            queue.session, queue.path, queue.grammar, queue.decoder, queue.clock, queue.timeout_s
        )
        self.folder = folder
        self.idempotent_writer = IdempotentWriter(folder.session, JOURNALS, clock=folder.clock)
        #: A separate writer, because a background thread may use it for as long as ZooKeeper is unreachable.
        self.puts = IdempotentWriter(folder.session, JOURNALS, clock=folder.clock)
        self.writer = Writer(
            folder,
            self.puts,
            max_items=queue.max_items,
            background=queue.put_in_background,
            listeners=queue.listeners,
        )
        self.ownership: ItemOwnership
        if queue.lock_path is None:
            self.ownership = DeletedOwnership(folder, self.idempotent_writer)
        else:
            self.ownership = LockedOwnership(folder, queue.lock_path)
        self.item_taker = ItemTaker(folder, self.ownership, self.wake_event, queue.min_items_before_refresh)
        self.consumer: Consumer | None = None
        self.listening = False


class CuratorQueue:
    """The common base of all kinds of queues.

    As a context manager, it calls :meth:`start` and :meth:`close`.

    Args:
        zookeeper: A :class:`~celery_dq.zookeeper.session.Session`, or a list of hosts
            (``host:2181,host:2181/chroot``) for a session that the queue opens and closes.
        path: The folder of the queue. One folder holds one kind of queue.
        consumer: Called with each item. Default None: only :meth:`poll` and :meth:`get` take items.
        serializer: ``"json"`` (default), ``"text"``, ``"bytes"``, or an object with ``serialize(item)`` and
            ``deserialize(bytes)``.
        lock_path: The folder of the locks; it must differ from `path`. An item is locked while it is consumed
            and deleted afterwards, so that it survives a crash of its consumer. Default None: an item is
            deleted first and lost with its consumer, as in Curator. All consumers of a queue must use the
            same value.
        on_failure: ``"requeue"`` (default): an item whose consumer raises is moved to the end of the queue,
            with its id, priority or due time. ``"delete"``: the item is deleted.
        max_items: Maximum number of nodes in the queue; ``put`` waits for room. Default None: no limit.
        put_in_background: Whether ``put`` returns at once and a thread sends the items; see :meth:`flush`.
            Default False.
        executor: Calls the consumer concurrently; it must use threads. Default None: a thread of the queue
            calls the consumer for one item at a time.
        prefetch: Maximum number of nodes that are held. Default: 100 with locks (fewer for a slow consumer),
            1 without locks, 16 with an executor.
        timeout_s: Seconds to wait for ZooKeeper and for room; default 10.
        final_flush_s: Seconds that :meth:`close` waits for items put in the background; default 5.
        clock: Wall and monotonic time; default: the system's clock.

    Raises:
        ConfigurationError: An option has an invalid value.
    """

    grammar: ClassVar[Grammar]
    #: Whether the data of a node is in Curator's framing.
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
                raise ConfigurationError(
                    f"lock_path = {lock_path!r} is the queue's path: give another folder"
                )
        if on_failure not in {"requeue", "delete"}:
            raise ConfigurationError(f"on_failure = {on_failure!r} is unknown: use 'requeue' or 'delete'")
        for name, value in (("max_items", max_items), ("prefetch", prefetch)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name} = {value!r} is invalid: give an integer from 1 on, or None")
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
        self._state = PerProcess(lambda: _ProcessQueue(self))
        self.listeners: list[Listener] = []

    # -- start and close

    def start(self) -> Self:
        """Start to consume, if the queue has a consumer. After a fork, the child must call this again."""
        own = self._state.get()
        if self._consume is not None and own.consumer is None:
            consumer = Consumer(
                own.folder,
                own.item_taker,
                own.ownership,
                self._consume,
                own.wake_event,
                requeue=self.requeues,
                executor=self._executor,
                prefetch=self._room(),
            )
            consumer.start()
            own.consumer = consumer
        return self

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop to consume, wait for running consumers, and send the items put in the background.

        Args:
            timeout_s: Seconds to wait for running consumers; default 10.

        Raises:
            ZooKeeperUnreachable: Some items put in the background could not be sent; :meth:`unsent` returns
                them.
        """
        own = self._state.get()
        consumer, own.consumer = own.consumer, None
        if consumer is not None and not consumer.stop(timeout_s):
            logger.warning(
                "The consumer of queue %s did not end within %g s; its item stays locked until the session "
                "ends, and is then consumed again.",
                self.path,
                timeout_s,
                extra={"event": "curator_consumer_abandoned"},
            )
        if own.listening:
            own.item_taker.stop()
            own.listening = False
        try:
            own.writer.close(self._final_flush_s)
        finally:
            own.puts.close()
            own.idempotent_writer.close()
            own.ownership.close()
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
        """Call `listener` after each node is created in ZooKeeper, with the list of its items."""
        self.listeners.append(listener)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all items put in the background are in ZooKeeper; False if `timeout_s` has passed."""
        return self._state.get().writer.flush(timeout_s)

    def unsent(self) -> list[Any]:
        """Return the items put in the background that are not confirmed by ZooKeeper."""
        return self._state.get().writer.unsent()

    def _put(self, prefix: str, nodes: Sequence[Sequence[Any]], timeout_s: float | None) -> None:
        """Create a node for each list of items."""
        serialize = self.serializer.serialize
        puts = [Put(prefix, frame([serialize(item) for item in items]), list(items)) for items in nodes]
        self._state.get().writer.put(puts, self.timeout_s if timeout_s is None else timeout_s)

    # -- take

    def poll(self, timeout_s: float = 0.0) -> LeasedItem | None:
        """Take the next node and hold it until it is finished.

        Args:
            timeout_s: Seconds to wait; default 0.

        Returns:
            The node; None if no node was available within `timeout_s` seconds.
        """
        return self._next(timeout_s)

    def get(self, timeout_s: float | None = None) -> LeasedItem:
        """Take the next node and hold it until it is finished.

        Args:
            timeout_s: Seconds to wait; None (default) means without a limit.

        Raises:
            QueueEmpty: No node was available within `timeout_s` seconds.
        """
        received = self._next(timeout_s)
        if received is None:
            raise QueueEmpty(f"queue {self.path} had no available node for {timeout_s:g} s")
        return received

    def peek(self) -> list[Any] | None:
        """Return the items of the next available node without taking it; None if no node is available."""
        with self._state.get().turn:
            node = self._item_taker().peek()
        return None if node is None else self.decoder.items(node.data)

    def size(self) -> int:
        """Return the number of nodes in the queue, including delayed and locked ones."""
        stat = self.session.ask(lambda client: client.exists_async(self.path), self.timeout_s)
        return 0 if stat is None else int(stat.numChildren)

    # -- inside

    def _item_taker(self) -> ItemTaker:
        own = self._state.get()
        if self._consume is not None:
            raise ConfigurationError(
                f"the queue at {self.path} has a consumer: take nodes by hand from a queue object without one"
            )
        if not own.listening:
            own.item_taker.start()
            own.listening = True
        return own.item_taker

    def _next(self, timeout_s: float | None) -> LeasedItem | None:
        own = self._state.get()
        deadline = math.inf if timeout_s is None else self.clock.monotonic() + timeout_s
        # A negative timeout would wait without a limit, or be refused.
        if not own.turn.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0)):
            return None
        try:
            left = None if timeout_s is None else max(0.0, deadline - self.clock.monotonic())
            nodes = self._item_taker().take_within(1, left)
        finally:
            own.turn.release()
        if not nodes:
            return None
        return LeasedItem(nodes[0], own.ownership, own.item_taker, self.decoder, requeues=self.requeues)

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
            # A held node is out of the order: a more urgent node that comes later must wait for it.
            room = min(room, max(1, self.min_items_before_refresh))
        return room


def check_path(name: str, path: str) -> None:
    """Check that a path is absolute and names a folder below the root.

    Args:
        name: Name of the option, for the error.
        path: The path.

    Raises:
        ConfigurationError: The path is invalid.
    """
    parts = path.split("/")[1:] if isinstance(path, str) else []
    if not parts or not path.startswith("/") or any(part in {"", ".", ".."} for part in parts):
        raise ConfigurationError(
            f"{name} = {path!r} is invalid: give an absolute path such as '/queues/mail'"
        )
    if parts[0] == ROOT[1:]:
        raise ConfigurationError(
            f"{name} = {path!r} is a place of celery-dq's own nodes ({ROOT}): give another path"
        )


class DistributedQueue(CuratorQueue):
    """A first-in, first-out queue of items, as in Curator; see :class:`CuratorQueue` for the options."""

    grammar = PLAIN

    def put(self, item: Any, *, timeout_s: float | None = None) -> None:
        """Put one item.

        Args:
            item: The item.
            timeout_s: Seconds to wait for room and for ZooKeeper; default: the queue's `timeout_s`.

        Raises:
            QueueFull: The queue stayed full for `timeout_s` seconds.
            ZooKeeperUnreachable: ZooKeeper did not answer; the item may have been put.
            MessageTooLarge: The item is too large and was not put.
        """
        self._put(QUEUE, [[item]], timeout_s)

    def put_multi(self, items: Sequence[Any], *, timeout_s: float | None = None) -> None:
        """Put several items in one node, to be consumed together and in order; raises as :meth:`put`."""
        self._put(QUEUE, [items] if items else [], timeout_s)

    def put_each(self, items: Sequence[Any], *, timeout_s: float | None = None) -> None:
        """Put several items in separate nodes, in few round trips; raises as :meth:`put`."""
        self._put(QUEUE, [[item] for item in items], timeout_s)


class DistributedIdQueue(CuratorQueue):
    """A queue of items with ids, by which they can be removed, as in Curator."""

    grammar = ID

    def put(self, item: Any, item_id: str, *, timeout_s: float | None = None) -> None:
        """Put one item with an id.

        Args:
            item: The item.
            item_id: Any non-empty text. Several items may have the same id.
            timeout_s: Seconds to wait for room and for ZooKeeper; default: the queue's `timeout_s`.

        Raises:
            InvalidMessage: `item_id` is invalid.
            QueueFull: The queue stayed full for `timeout_s` seconds.
            ZooKeeperUnreachable: ZooKeeper did not answer; the item may have been put.
            MessageTooLarge: The item is too large and was not put.
        """
        self._put(id_prefix(item_id), [[item]], timeout_s)

    def remove(self, item_id: str) -> int:
        """Remove all items with this id that no consumer holds; return how many were removed."""
        id_prefix(item_id)
        holding = self._state.get().ownership
        return sum(holding.remove(name) for name in self._names() if id_of(name) == item_id)

    def ids(self) -> list[str]:
        """Return the ids of all items in the queue, unordered."""
        return [item_id for name in self._names() if (item_id := id_of(name)) is not None]

    def _names(self) -> list[str]:
        if self.size() == 0:
            return []
        names: list[str] = self.session.ask(
            lambda client: client.get_children_async(self.path), self.timeout_s
        )
        return names


class DistributedPriorityQueue(CuratorQueue):
    """A queue of items with priorities, **lower ones first**, as in Curator.

    Args:
        zookeeper: As for :class:`CuratorQueue`.
        path: As for :class:`CuratorQueue`.
        min_items_before_refresh: Number of items that may be served before a later, more urgent one;
            default 0. A smaller number causes more readings of the names, each about 1 ms per 1,000 names.
        **options: The other options of :class:`CuratorQueue`.
    """

    grammar = PRIORITY

    def __init__(
        self, zookeeper: Session | str, path: str, *, min_items_before_refresh: int = 0, **options: Any
    ) -> None:
        super().__init__(zookeeper, path, **options)
        if min_items_before_refresh < 0:
            raise ConfigurationError(
                f"min_items_before_refresh = {min_items_before_refresh} is invalid: give an integer from 0 on"
            )
        self.min_items_before_refresh = min_items_before_refresh

    def put(self, item: Any, priority: int, *, timeout_s: float | None = None) -> None:
        """Put one item with a priority.

        Args:
            item: The item.
            priority: A 32-bit integer; may be negative.
            timeout_s: Seconds to wait for room and for ZooKeeper; default: the queue's `timeout_s`.

        Raises:
            InvalidPriority: `priority` is not an integer, or out of range.
            QueueFull: The queue stayed full for `timeout_s` seconds.
            ZooKeeperUnreachable: ZooKeeper did not answer; the item may have been put.
            MessageTooLarge: The item is too large and was not put.
        """
        self._put(priority_prefix(priority), [[item]], timeout_s)

    def put_multi(self, items: Sequence[Any], priority: int, *, timeout_s: float | None = None) -> None:
        """Put several items in one node, to be consumed together and in order; raises as :meth:`put`."""
        self._put(priority_prefix(priority), [items] if items else [], timeout_s)


class DistributedDelayQueue(CuratorQueue):
    """A queue of items with due times, as in Curator.

    A due time is absolute, in milliseconds, and compared with the clock of the consumer's machine.
    """

    grammar = DELAY

    def put(self, item: Any, due: float | datetime, *, timeout_s: float | None = None) -> None:
        """Put one item that is served from its due time on.

        Args:
            item: The item.
            due: Seconds since 1970, or a datetime with a time zone.
            timeout_s: Seconds to wait for room and for ZooKeeper; default: the queue's `timeout_s`.

        Raises:
            InvalidMessage: `due` is invalid.
            QueueFull: The queue stayed full for `timeout_s` seconds.
            ZooKeeperUnreachable: ZooKeeper did not answer; the item may have been put.
            MessageTooLarge: The item is too large and was not put.
        """
        self._put(delay_prefix(due_ms(due)), [[item]], timeout_s)

    def put_multi(
        self, items: Sequence[Any], due: float | datetime, *, timeout_s: float | None = None
    ) -> None:
        """Put several items in one node, to be consumed together and in order; raises as :meth:`put`."""
        self._put(delay_prefix(due_ms(due)), [items] if items else [], timeout_s)


def due_ms(due: float | datetime) -> int:
    """Convert a due time to milliseconds since 1970, rounded up so that no item is served early.

    Raises:
        InvalidMessage: `due` is not a finite number, or a datetime without a time zone.
    """
    if isinstance(due, datetime):
        if due.tzinfo is None:
            raise InvalidMessage(f"due = {due!r} has no time zone: use datetime.now(timezone.utc)")
        due = due.timestamp()
    if isinstance(due, bool) or not isinstance(due, int | float) or not math.isfinite(due):
        raise InvalidMessage(f"due = {due!r} is invalid: give seconds since 1970 or a datetime")
    return math.ceil(due * 1000)


class SimpleDistributedQueue:
    """A first-in, first-out queue of bytes, as in ZooKeeper's recipe. A context manager.

    An element is deleted when it is taken. It is lost if the consumer dies before it has processed it.

    Args:
        zookeeper: A :class:`~celery_dq.zookeeper.session.Session`, or a list of hosts for a session that the
            queue opens and closes.
        path: The folder of the queue.
        timeout_s: Seconds to wait for ZooKeeper; default 10.
    """

    def __init__(self, zookeeper: Session | str, path: str, *, timeout_s: float = 10.0) -> None:
        self._queue = _Elements(zookeeper, path, serializer="bytes", timeout_s=timeout_s)

    @property
    def path(self) -> str:
        """The folder of the queue."""
        return self._queue.path

    def offer(self, data: bytes) -> None:
        """Add `data` at the end of the queue.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the element may have been added.
            MessageTooLarge: The element is too large and was not added.
        """
        self._queue.offer_each([data])

    def offer_each(self, elements: list[bytes]) -> None:
        """Add several elements in few round trips; raises as :meth:`offer`."""
        self._queue.offer_each(elements)

    def peek(self) -> bytes | None:
        """Return the first element without taking it; None if the queue is empty."""
        items = self._queue.peek()
        return None if items is None else items[0]

    def element(self) -> bytes:
        """Return the first element without taking it.

        Raises:
            QueueEmpty: The queue is empty.
        """
        return self._there(self.peek())

    def poll(self, timeout_s: float = 0.0) -> bytes | None:
        """Take the first element; None if the queue stays empty for `timeout_s` seconds (default 0)."""
        received = self._queue.poll(timeout_s)
        return None if received is None else received.item

    def remove(self) -> bytes:
        """Take the first element.

        Raises:
            QueueEmpty: The queue is empty.
        """
        return self._there(self.poll())

    def take(self) -> bytes:
        """Take the first element; wait for it without a limit."""
        data: bytes = self._queue.get().item
        return data

    def size(self) -> int:
        """Return the number of elements."""
        return self._queue.size()

    def close(self) -> None:
        """Delete this process's own nodes in ZooKeeper, and end a session that the queue has opened."""
        self._queue.close()

    def __enter__(self) -> SimpleDistributedQueue:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _there(self, data: bytes | None) -> bytes:
        if data is None:
            raise QueueEmpty(
                f"queue {self._queue.path} is empty: use poll(), which returns None, or take(), which waits"
            )
        return data


class _Elements(CuratorQueue):
    """The queue of nodes for the elements, without framing and locks."""

    grammar = SIMPLE
    framed = False

    def offer_each(self, elements: list[Any]) -> None:
        serialize = self.serializer.serialize
        puts = [Put("qn-", serialize(each), [each]) for each in elements]
        self._state.get().writer.put(puts, self.timeout_s)
