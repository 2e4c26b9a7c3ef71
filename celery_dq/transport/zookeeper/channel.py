"""The kombu channel of the ZooKeeper broker, its messages, its prefetch count and its batches."""

from __future__ import annotations

import contextlib
from typing import Any

from kazoo.exceptions import KazooException

from celery_dq.errors import CorruptRecord
from celery_dq.shown import shown_logger
from celery_dq.transport import envelope
from celery_dq.transport.in_flight import QoS as SettlingQoS, StoredMessage
from celery_dq.transport.packer import STAMPS, PublishBatch
from celery_dq.transport.threaded_channel import ThreadedChannel
from celery_dq.transport.zookeeper.dead_letters import ZooKeeperDeadLetters, dead_letter_record
from celery_dq.transport.zookeeper.in_flight import ClaimedItem, ItemOutcome
from celery_dq.transport.zookeeper.publisher import Item, transactions
from celery_dq.transport.zookeeper.queues import ANSWER_S, ZooKeeperQueues
from celery_dq.transport.zookeeper.record import ZooKeeperRecord
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


class QoS(SettlingQoS):
    """Prefetch count and acknowledgements of one channel.

    Acknowledgements may come from any thread. They are queued with the in-flight messages of the connection,
    and the fetcher's thread sends them to the broker.
    """

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Requeue the message at its place, or delete it."""
        if requeue:
            crashed = getattr(self._delivered.get(delivery_tag), "crashed", False)
            self.release(delivery_tag, "crashed" if crashed else "requeue")
            self.channel.send_acks_now()
        else:
            self.ack(delivery_tag)

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Requeue every message that was delivered and not acknowledged."""
        for tag in list(self._delivered):
            self.release(tag, "requeue")
        return []


class ZooKeeperPublishBatch(PublishBatch):
    """A batch whose messages are published in transactions."""

    def __init__(self, channel: Channel, max_size: int) -> None:
        super().__init__(channel, max_size)
        #: The messages of the transaction that was sent last, and its stamp until it was answered.
        self._piece: list[Item] = []
        self._stamps: dict[str, Any] = {}

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
        super().discard()
        self._stamps.clear()


class Channel(ThreadedChannel):
    """A channel whose queues are folders in ZooKeeper."""

    QoS = QoS
    supports_batch_publish = True

    _transport: Any

    # -- publishing ------------------------------------------------------------

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        parts = self._transport.packer.parts(message, queue, whole=True)
        item = self._item(queue, ZooKeeperRecord.of(parts))
        batch: ZooKeeperPublishBatch | None = kwargs.get("_publish_batch")
        if batch is not None:
            batch.add(item)
        else:
            self.put([item], message["properties"].setdefault(STAMPS, {}), queue)

    def _item(self, queue: str, record: ZooKeeperRecord) -> Item:
        nodes = self.stored_queues.nodes(queue)
        if record.due_ms > self._transport.clock.wall() * 1000:
            return Item(queue, nodes.delayed_prefix(record.due_ms), record.pack())
        return Item(queue, nodes.ready_prefix(record.priority), record.pack())

    def put(self, items: list[Item], stamps: dict[str, Any], key: str) -> None:
        """Create all items in one transaction, once; see :class:`ZooKeeperPublisher`."""
        while True:
            missing = self._transport.publisher.put(items, stamps, key)
            if missing is None:
                break
            self.stored_queues.restore(missing)
        self.published({item.queue for item in items})

    def create_publish_batch(self, max_size: int) -> ZooKeeperPublishBatch:
        """Create the batch for kombu's ``Producer.batch()``."""
        return ZooKeeperPublishBatch(self, max_size)

    # -- consuming -------------------------------------------------------------

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

    def waiting_headers(self, queue: str, most: int) -> list[dict[str, Any]]:
        """Return the headers of the next messages of a queue, which stay in it."""
        queues = self.stored_queues
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

    def discard(self, message: Message) -> None:
        """Dead-letter a message, and record in Celery that its task will not run."""
        held = message.held
        worker = self._transport.worker
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
        return ZooKeeperDeadLetters(self.stored_queues, queue, self._transport.clock)

    @property
    def stored_queues(self) -> ZooKeeperQueues:
        """The queues as they are in ZooKeeper."""
        queues: ZooKeeperQueues = self._transport.queues
        return queues
