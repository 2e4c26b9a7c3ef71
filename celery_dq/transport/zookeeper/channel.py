"""The kombu channel of the ZooKeeper broker, its messages, its prefetch count and its batches."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from kazoo.exceptions import KazooException

from celery_dq.clock import Clock
from celery_dq.errors import CorruptRecord
from celery_dq.per_process import OwnerProcess
from celery_dq.protocols import DiscardHandler
from celery_dq.shown import shown_logger
from celery_dq.transport import envelope
from celery_dq.transport.in_flight.message import PrefetchCount
from celery_dq.transport.stored_message import StoredMessage
from celery_dq.transport.threaded_channel import ThreadedChannel, ThreadedConnection
from celery_dq.transport.zookeeper.dead_letters import ZooKeeperDeadLetters, dead_letter_record
from celery_dq.transport.zookeeper.in_flight import ClaimedItem, ItemOutcome, ZooKeeperInFlight
from celery_dq.transport.zookeeper.publisher import Item, ZooKeeperPublisher, transactions
from celery_dq.transport.zookeeper.queues import ANSWER_S, ZooKeeperQueues
from celery_dq.transport.zookeeper.record import STAMPS, ZooKeeperRecord, record_of
from celery_dq.transport.zookeeper.subscription import ZooKeeperSubscription
from celery_dq.znodes import served_in_order
from celery_dq.zookeeper.multi_read import read_all

logger = shown_logger(__name__)


class Message(StoredMessage):
    """A message taken from a queue, under a lock.

    Attributes:
        queue: Name of the queue from which the message was taken.
        deliveries: Number of deliveries so far that ended with the loss of the consumer.
        discard: Why the message must not run (``dead:max_deliveries``), or ``""``.
        crashed: Whether a requeue counts as a lost consumer.
        held: The item that this connection has locked.
    """

    def __init__(self, record: ZooKeeperRecord, held: ClaimedItem, queue: str, channel: Any) -> None:
        super().__init__(
            record.envelope,
            record.body,
            priority=record.priority,
            due_us=record.due_ms * 1000,
            returned=held.returned,
            deliveries=held.deliveries,
            tag=held.tag,
            queue=queue,
            channel=channel,
        )
        self.delivery_info["priority"] = record.priority
        self.held = held
        self.discard = "dead:max_deliveries" if held.exhausted else ""
        self.crashed = False

    def dead_letter(self, reason: str) -> None:
        """Move the message to the dead letters with *reason*; a later ack or reject has no effect."""
        self.channel.dead_letter(self, reason)

    def ack(self, multiple: bool = False) -> None:
        """Acknowledge the message. A message to be discarded stays in ZooKeeper as a dead letter."""
        if self.discard:
            self._state = "ACK"
        else:
            super().ack(multiple=multiple)


class QoS(PrefetchCount):
    """Prefetch count and acknowledgements of one channel.

    Acknowledgements may come from any thread. They are queued with the in-flight messages of the connection,
    and the fetcher's thread sends them to the broker.
    """

    channel: Channel

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._owner = OwnerProcess()

    def ack(self, delivery_tag: str) -> None:
        """Delete the message from its queue."""
        self._delivered.pop(delivery_tag, None)
        self.channel.in_flight.add_outcome(ItemOutcome.ACK, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Requeue the message at its place, or delete it."""
        if requeue:
            message = self._delivered.get(delivery_tag)
            crashed = getattr(message, "crashed", False)
            self._return(ItemOutcome.CRASHED if crashed else ItemOutcome.REQUEUE, delivery_tag)
        else:
            self.ack(delivery_tag)

    def _return(self, verb: ItemOutcome, delivery_tag: str) -> None:
        in_flight = self.channel.in_flight
        # Queued before it makes room: the fetcher must not take a later message in between.
        in_flight.add_outcome(verb, delivery_tag)
        self._delivered.pop(delivery_tag, None)
        in_flight.wake()

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Requeue every message that was delivered and not acknowledged."""
        for tag in list(self._delivered):
            self._return(ItemOutcome.REQUEUE, tag)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Like :meth:`restore_unacked`, at channel close or interpreter exit, once."""
        self._on_collect.cancel()
        if self._delivered.restored or not self._owner.is_current:
            # A forked child has inherited this object: the in-flight messages belong to the parent.
            return
        self._delivered.restored = True
        if self.restore_at_shutdown and self.channel.do_restore:
            self.restore_unacked()


class ZooKeeperPublishBatch:
    """Collects messages for kombu's ``Producer.batch()`` and publishes them in one transaction.

    Args:
        channel: The channel that publishes.
        max_size: Number of messages at which the batch flushes by itself.
    """

    def __init__(self, channel: Channel, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._waiting: list[Item] = []
        #: The messages of the transaction that was sent last, and its stamp until it was answered.
        self._piece: list[Item] = []
        self._stamps: dict[str, Any] = {}

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Check one message and add it to the batch."""
        return self.channel.basic_publish(message, _publish_batch=self, **kwargs)

    def add(self, item: Item) -> None:
        """Add an item; called by the channel after it has routed the message."""
        self._waiting.append(item)
        if len(self._waiting) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Publish the collected messages in order.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer. The unconfirmed messages stay in the batch, and a
                second flush creates nothing twice.
        """
        while self._waiting:
            if not self._stamps:
                self._piece = list(transactions(self._waiting)[0])
            # A repeat has the messages of the attempt without answer, and none that was added since.
            self.channel.put(self._piece, self._stamps, "batch")
            self._stamps.clear()
            del self._waiting[: len(self._piece)]

    def discard(self) -> None:
        """Drop the collected messages."""
        self._waiting.clear()
        self._stamps.clear()

    def close(self) -> None:
        """Do nothing: the connection belongs to the channel."""


class ZooKeeperConnection(ThreadedConnection, Protocol):
    """The transport, as its channels use it."""

    clock: Clock
    publisher: ZooKeeperPublisher
    in_flight: ZooKeeperInFlight

    @property
    def queues(self) -> ZooKeeperQueues:
        """The queues as they are in ZooKeeper."""

    @property
    def discard_handler(self) -> DiscardHandler | None:
        """The worker's handler of messages that will not run; None if this process is not a worker."""

    def max_deliveries(self, queue: str) -> int:
        """How many consumers of a message may be lost before it is a dead letter; 0 means no limit."""

    def subscription_of(self, queue: str) -> ZooKeeperSubscription:
        """Make the subscription to *queue*."""

    def take_one(self, queue: str) -> list[ClaimedItem]:
        """Take one message of *queue* now; an empty list if none is available."""


class Channel(ThreadedChannel):
    """A channel whose queues are folders in ZooKeeper."""

    QoS = QoS
    supports_batch_publish = True

    def __init__(self, connection: ZooKeeperConnection, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._transport = connection

    @property
    def in_flight(self) -> ZooKeeperInFlight:
        """The in-flight messages of the connection."""
        return self._transport.in_flight

    # -- publishing ------------------------------------------------------------

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        """Publish a message once per queue: the stamps of a failed attempt stay on the message.

        Raises:
            ZooKeeperUnreachable: The channel was closed, or ZooKeeper did not answer.
        """
        self.refuse_closed()
        result = super().basic_publish(message, exchange, routing_key, **kwargs)
        message["properties"].pop(STAMPS, None)
        return result

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        item = self._item(queue, record_of(message))
        batch: ZooKeeperPublishBatch | None = kwargs.get("_publish_batch")
        if batch is not None:
            batch.add(item)
        else:
            self.put([item], message["properties"].setdefault(STAMPS, {}), queue)

    def _item(self, queue: str, record: ZooKeeperRecord) -> Item:
        nodes = self._transport.queues.nodes(queue)
        if record.due_ms > self._transport.clock.wall() * 1000:
            return Item(queue, nodes.delayed_prefix(record.due_ms), record.pack())
        return Item(queue, nodes.ready_prefix(record.priority), record.pack())

    def put(self, items: list[Item], stamps: dict[str, Any], key: str) -> None:
        """Create all items in one transaction, once; see :class:`ZooKeeperPublisher`."""
        while True:
            missing = self._transport.publisher.put(items, stamps, key)
            if missing is None:
                break
            self._transport.queues.restore(missing)
        self.published({item.queue for item in items})

    def create_publish_batch(self, max_size: int) -> ZooKeeperPublishBatch:
        """Create the batch for kombu's ``Producer.batch()``."""
        return ZooKeeperPublishBatch(self, max_size)

    # -- consuming -------------------------------------------------------------

    def new_source(self, queue: str) -> ZooKeeperSubscription:
        """Make the subscription to a queue for this channel; nothing is taken yet."""
        return self._transport.subscription_of(queue)

    def finish_unacked(self, delivery_tag: str) -> None:
        """Delete the item."""
        self.in_flight.add_outcome(ItemOutcome.ACK, delivery_tag)

    def read_message(self, queue: str, held: ClaimedItem) -> Message | None:
        """Make the message of an item; None after an item that cannot be decoded was moved away."""
        try:
            return Message(ZooKeeperRecord.unpack(held.data), held, queue, self)
        except CorruptRecord as error:
            logger.error(
                "The message at %s cannot be decoded: %s. It is moved to %s and will not be delivered.",
                held.item,
                error,
                held.nodes.unreadable,
                extra={"event": "zookeeper_message_unreadable"},
            )
            self.in_flight.add_outcome(ItemOutcome.DEAD_LETTER, held.tag)
            return None

    @property
    def in_worker(self) -> bool:
        """Whether this process is a worker."""
        return self._transport.discard_handler is not None

    def waiting_headers(self, queue: str, most: int) -> list[dict[str, Any]]:
        """Return the headers of the next messages of a queue, which stay in it."""
        queues = self._transport.queues
        nodes = queues.nodes(queue)
        locked = set(queues.children(nodes.locks))
        names = [name for name in served_in_order(queues.children(nodes.ready)) if name not in locked]
        found = []
        for answer in read_all(queues.session, [f"{nodes.ready}/{name}" for name in names[:most]], ANSWER_S):
            with contextlib.suppress(CorruptRecord, KazooException):
                if isinstance(answer, Exception):
                    raise answer
                found.append(envelope.unpack(ZooKeeperRecord.unpack(answer[0]).envelope)[0])
        return found

    def discard(self, message: Message, held: ClaimedItem) -> None:
        """Dead-letter a message, and record in Celery that its task will not run."""
        worker = self._transport.discard_handler
        try:
            # After twice as many lost consumers, the recording itself is taken to be what crashes them.
            if worker is not None and held.deliveries < 2 * self._transport.max_deliveries(message.queue):
                worker.deliver_discard(message, message.discard)
        finally:
            self.dead_letter(message, message.discard.partition(":")[2])
            logger.error(
                "Message %s of queue %s becomes a dead letter: %d of its consumers were lost, the last one "
                "was %s. Replay it when the cause is mended.",
                held.letter[0],
                message.queue,
                held.deliveries,
                held.worker or "unknown",
                extra={"event": "zookeeper_message_dead_lettered"},
            )

    def dead_letter(self, message: Message, reason: str) -> None:
        """Move a message to the dead letters."""
        held = message.held
        held.letter = dead_letter_record(held, message.headers, reason, self._transport.clock.wall())
        self.in_flight.add_outcome(ItemOutcome.GIVE_UP, held.tag)
        self.qos.forget(held.tag)

    def dead_letters(self, queue: str) -> ZooKeeperDeadLetters:
        """The dead letters of *queue*."""
        return ZooKeeperDeadLetters(self._transport.queues, queue, self._transport.clock)

    @property
    def stored_queues(self) -> ZooKeeperQueues:
        """The queues as they are in ZooKeeper."""
        return self._transport.queues

    def queue_names(self) -> list[str]:
        """The names of all declared queues that are not transient."""
        return self._transport.queues.names()

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Take one message now; None if no message is available."""
        self._transport.refuse_inherited()
        for held in self._transport.take_one(queue):
            message = self.read_message(queue, held)
            if message is not None and message.discard:
                self.discard(message, held)
            elif message is not None:
                if no_ack:
                    self.in_flight.add_outcome(ItemOutcome.ACK, held.tag)
                else:
                    self.qos.append(message, held.tag)
                return message
        return None
