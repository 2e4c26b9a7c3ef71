"""The common base of all queues of items: options, start and close, and taking single nodes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from celery_dq.clock import Clock, SystemClock
from celery_dq.curator.consumer import Consumer
from celery_dq.curator.framing import frame
from celery_dq.curator.item_ownership import DeletedOwnership, ItemOwnership, LockedOwnership, Node
from celery_dq.curator.listing import Listing
from celery_dq.curator.names import Grammar
from celery_dq.curator.serializing import Decoder, Serializer, serializer_of
from celery_dq.curator.taking import ItemTaker
from celery_dq.curator.writer import Listener, Put, Writer
from celery_dq.errors import ConfigurationError, QueueEmpty
from celery_dq.per_process import PerProcess
from celery_dq.shown import shown_logger
from celery_dq.znodes import JOURNALS, ROOT
from celery_dq.zookeeper.idempotent_writer import IdempotentWriter
from celery_dq.zookeeper.item_locks import FinishOutcome
from celery_dq.zookeeper.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CuratorQueue", "LeasedItem", "check_path"]

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

    The node is held until :meth:`finish`, :meth:`requeue` or :meth:`release` is called.

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
        return self._settle(self._ownership.finish([self._node])[0])

    def requeue(self) -> bool:
        """Move the node to the end of the queue, with its id, priority or due time.

        Returns:
            As :meth:`finish`.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        return self._settle(self._ownership.requeue(self._node, frame(self._raw)))

    def release(self) -> None:
        """Return the node to its old place, or without locks to the end of the queue.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        self._ownership.release([self._node])
        self._item_taker.release([self._node])

    def _settle(self, outcome: FinishOutcome) -> bool:
        self._item_taker.settle([self._node], [outcome])
        return outcome is not FinishOutcome.LOST

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
        self.idempotent_writer = IdempotentWriter(queue.session, JOURNALS, clock=queue.clock)
        #: A separate writer, because a background thread may use it for as long as ZooKeeper is unreachable.
        self.puts = IdempotentWriter(queue.session, JOURNALS, clock=queue.clock)
        self.writer = Writer(
            queue.session,
            queue.path,
            self.puts,
            queue.clock,
            max_items=queue.max_items,
            background=queue.put_in_background,
            listeners=queue.listeners,
        )
        self.ownership: ItemOwnership
        if queue.lock_path is None:
            self.ownership = DeletedOwnership(
                queue.session,
                queue.path,
                queue.grammar,
                self.idempotent_writer,
                queue.decoder,
                queue.timeout_s,
            )
        else:
            self.ownership = LockedOwnership(
                queue.session, queue.path, queue.lock_path, queue.grammar, queue.decoder, queue.timeout_s
            )
        feed = Listing(
            queue.session,
            queue.path,
            queue.grammar,
            queue.clock,
            self.wake_event.set,
            timeout_s=queue.timeout_s,
            min_items=queue.min_items_before_refresh,
        )
        self.item_taker = ItemTaker(queue.session, feed, self.ownership, self.wake_event)
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
            own.consumer = Consumer(
                own.item_taker,
                own.ownership,
                self.decoder,
                self._consume,
                own.wake_event,
                name=self.path,
                requeue=self.requeues,
                executor=self._executor,
                prefetch=self._room(),
                clock=self.clock,
            )
            own.consumer.start()
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
        if not own.turn.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return None
        try:
            left = None if timeout_s is None else max(0.0, deadline - self.clock.monotonic())
            nodes = self._item_taker().take_within(1, left, self.clock)
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
