"""The kombu channel of the ZooKeeper broker."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from celery_dq.clock import Clock
from celery_dq.errors import CorruptRecord, ZooKeeperUnreachable
from celery_dq.per_process import OwnerProcess
from celery_dq.protocols import DiscardHandler
from celery_dq.transport.bases import VirtualChannel
from celery_dq.transport.queue_arguments import queue_arguments, warn_of_ignored
from celery_dq.transport.zookeeper.batch import ZooKeeperPublishBatch
from celery_dq.transport.zookeeper.bindings import Bindings
from celery_dq.transport.zookeeper.dead_letters import ZooKeeperDeadLetters, dead_letter_record
from celery_dq.transport.zookeeper.in_flight import ClaimedItem, ItemOutcome, ZooKeeperInFlight
from celery_dq.transport.zookeeper.message import Message
from celery_dq.transport.zookeeper.publisher import Item, ZooKeeperPublisher
from celery_dq.transport.zookeeper.qos import QoS
from celery_dq.transport.zookeeper.queues import ZooKeeperQueues
from celery_dq.transport.zookeeper.record import STAMPS, ZooKeeperRecord, record_of
from celery_dq.transport.zookeeper.subscription import ZooKeeperSubscription

logger = logging.getLogger(__name__)

#: Maximum number of messages that are taken ahead for consumers without a prefetch count.
MOST_AHEAD = 100
#: A transient queue with this many messages gets no more broadcasts: its user has gone or cannot keep up.
TRANSIENT_CAP = 1000

Consumer = tuple[str, Callable[[Any], Any], bool]


class BrokerConnection(Protocol):
    """The transport, as its channels use it."""

    clock: Clock
    queues: ZooKeeperQueues
    bindings: Bindings
    publisher: ZooKeeperPublisher
    in_flight: ZooKeeperInFlight

    @property
    def discard_handler(self) -> DiscardHandler | None:
        """The worker's handler of messages that will not run; None if this process is no worker."""

    def max_deliveries(self, queue: str) -> int:
        """How many consumers of a message may be lost before it is a dead letter; 0 means no limit."""

    def refuse_inherited(self) -> None:
        """Refuse to use a connection that was inherited through a fork."""

    def consume(self, channel: Channel, queue: str) -> ZooKeeperSubscription:
        """Start to take messages from *queue* for *channel*."""

    def cancel(self, source: ZooKeeperSubscription) -> None:
        """Stop taking from *source*, and requeue its messages that were not delivered."""

    def take_one(self, queue: str) -> list[ClaimedItem]:
        """Take one message of *queue* now; an empty list if none is available."""

    def look_again(self) -> None:
        """Wake the fetcher, to send acknowledgements or take more messages."""

    def flush(self) -> None:
        """Send all outcomes of in-flight messages."""

    def leave(self, queue: str) -> None:
        """End the use of a transient queue."""

    def close_channel(self, channel: Channel) -> None:
        """Forget the channel."""


class Channel(VirtualChannel):
    """A channel whose queues are folders in ZooKeeper."""

    QoS = QoS
    #: Read by kombu.
    supports_fanout = True
    supports_batch_publish = True

    def __init__(self, connection: BrokerConnection, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._transport = connection
        self._owner = OwnerProcess()
        self._sources: dict[str, ZooKeeperSubscription] = {}
        self._called: dict[str, deque[Consumer]] = {}
        self._transients: set[str] = set()

    @property
    def in_flight(self) -> ZooKeeperInFlight:
        """The in-flight messages of the connection."""
        return self._transport.in_flight

    def uses(self, queue: str) -> bool:
        """Whether this transient queue was declared on this channel."""
        return queue in self._transients

    # -- declaring -------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        """Return the arguments of a queue together with those of kombu's ``Queue``, such as ``expires``."""
        return queue_arguments(arguments, options)

    def _new_queue(self, queue: str, auto_delete: bool = False, **kwargs: Any) -> None:
        self._transport.queues.declare(queue, auto_delete)
        if auto_delete:
            self._transients.add(queue)
        else:
            warn_of_ignored(queue, kwargs.get("arguments"))

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self._transport.queues.exists(queue)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        self._transport.bindings.bind(exchange, queue, routing_key or "", queue in self._transients)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", *args: Any, **kwargs: Any
    ) -> None:
        """Remove a binding, including one that another process made."""
        self.state.binding_delete(queue, exchange, routing_key)
        self._transport.bindings.unbind(exchange or "amq.direct", queue, routing_key)

    def get_table(self, exchange: str, fresh: bool = False) -> list[tuple[Any, ...]]:
        """Return the bindings of *exchange* that all processes have made."""
        kind = self.typeof(exchange)
        return [
            kind.prepare_bind(binding.queue, exchange, binding.routing_key, None)
            for binding in self._transport.bindings.table(exchange, fresh)
        ]

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        if not exchange:
            return [routing_key or default or self.deadletter_queue or ""]
        found = self._matching(exchange, routing_key)
        if not found and self.typeof(exchange).type == "direct":
            # The reply queue may have been bound a moment ago, through another server of the ensemble.
            found = self._matching(exchange, routing_key, fresh=True)
        default = default or self.deadletter_queue
        if not found and default is not None:
            warnings.warn(
                f"No queue is bound to exchange {exchange!r} with routing key {routing_key!r}: the message "
                f"goes to queue {default!r}",
                stacklevel=2,
            )
            self._new_queue(default)
            found = [default]
        return found

    def _matching(self, exchange: str, routing_key: str, fresh: bool = False) -> list[str]:
        kind = self.typeof(exchange)
        return sorted(kind.lookup(self.get_table(exchange, fresh), exchange, routing_key, None))

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        """Delete *queue* with its messages, also if another connection declared it."""
        if if_empty and self._size(queue):
            return
        super().queue_delete(queue, if_unused=if_unused, if_empty=if_empty, **kwargs)
        self._transients.discard(queue)
        self._transport.queues.delete(queue)

    def _delete(self, queue: str, exchange: str, routing_key: str, *args: Any, **kwargs: Any) -> None:
        self._transport.bindings.unbind(exchange, queue, routing_key or "")

    def _size(self, queue: str) -> int:
        return self._transport.queues.size(queue)

    def _purge(self, queue: str) -> int:
        return self._transport.queues.purge(queue)

    # -- publishing ------------------------------------------------------------

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        """Publish a message once per queue: the stamps of a failed attempt stay on the message.

        Raises:
            ZooKeeperUnreachable: The channel was closed, or ZooKeeper did not answer.
        """
        if self.closed:
            raise ZooKeeperUnreachable("The channel was closed: publish on a new one")
        result = super().basic_publish(message, exchange, routing_key, **kwargs)
        message["properties"].pop(STAMPS, None)
        return result

    def _inplace_augment_message(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        # No base64: a record holds raw bytes, and base64 adds a third to the size.
        message["properties"]["delivery_info"].update(exchange=exchange, routing_key=routing_key)

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
        for queue in {item.queue for item in items}:
            source = self._sources.get(queue)
            if source is not None:
                source.look_now()

    def create_publish_batch(self, max_size: int) -> ZooKeeperPublishBatch:
        """Create the batch for kombu's ``Producer.batch()``."""
        return ZooKeeperPublishBatch(self, max_size)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        table = self._transport.bindings.table(exchange)
        lasting = sorted({binding.queue for binding in table if not binding.transient})
        passing = sorted({binding.queue for binding in table if binding.transient} - {*lasting})
        loads = self._transport.queues.loads(passing) if passing else []
        for queue, load in zip(passing, loads, strict=True):
            if load is not None and load < TRANSIENT_CAP:
                lasting.append(queue)
            elif load is not None:
                logger.warning(
                    "Transient queue %s holds %d messages; a broadcast to exchange %s was not copied to it. "
                    "Its user has gone or cannot keep up.",
                    queue,
                    load,
                    exchange,
                    extra={"event": "zookeeper_broadcast_dropped"},
                )
        for queue in lasting:
            self._put(queue, message)

    # -- consuming -------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        """Consume *queue*; several consumers of one queue on a channel receive messages in rotation."""
        self._transport.refuse_inherited()
        self._tag_to_queue[consumer_tag] = queue
        self._active_queues.append(queue)
        self._consumers.add(consumer_tag)
        self._called.setdefault(queue, deque()).append((consumer_tag, callback, no_ack))
        if queue not in self._sources:
            self._transport.queues.declare(queue, queue in self._transients)
            self._sources[queue] = self._transport.consume(self, queue)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop a consumer. Messages that were taken and not delivered are requeued."""
        queue = self._tag_to_queue.get(consumer_tag)
        if queue is not None:
            kept = deque(each for each in self._called.get(queue, ()) if each[0] != consumer_tag)
            if kept:
                self._called[queue] = kept
            else:
                self._called.pop(queue, None)
                source = self._sources.pop(queue, None)
                if source is not None:
                    self._transport.cancel(source)
        super().basic_cancel(consumer_tag)

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Change the prefetch count, and let the fetcher take more messages if it allows."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self._transport.look_again()

    def _reset_cycle(self) -> None:
        """Do nothing: the transport delivers the messages."""

    def room(self, source: ZooKeeperSubscription) -> int:
        """How many messages the fetcher may take from *source* now; called in the fetcher's thread."""
        qos = self.qos
        if self.closed or not qos.can_consume():
            return 0
        sources = tuple(self._sources.values())
        ahead = sum(len(each.inbox) for each in sources)
        allowed = qos.can_consume_max_estimate()
        room = (MOST_AHEAD if allowed is None else allowed) - ahead
        # Each queue gets its share of the prefetch count.
        return min(room, max(room // max(len(sources), 1), 1)) if room > 0 else 0

    def deliver_one(self, source: ZooKeeperSubscription) -> bool:
        """Deliver the oldest message of *source* if the prefetch count allows.

        Returns:
            Whether a message was delivered.
        """
        consumers = self._called.get(source.queue)
        if not source.inbox or not consumers or not self.qos.can_consume():
            return False
        held = source.inbox[0]
        message = self._message(source.queue, held)
        if message is not None and message.discard:
            source.inbox.popleft()
            self._give_up(message, held)
            return False
        consumers.rotate(-1)
        _, callback, no_ack = consumers[-1]
        if message is not None and not no_ack:
            # Count the message before it leaves the inbox, so that the fetcher never takes one too many.
            self.qos.append(message, held.tag)
        source.inbox.popleft()
        if message is None:
            return False
        if no_ack:
            self.in_flight.add_outcome(ItemOutcome.ACK, held.tag)
        callback(message)
        return True

    def _message(self, queue: str, held: ClaimedItem) -> Message | None:
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

    def _give_up(self, message: Message, held: ClaimedItem) -> None:
        """Dead-letter a message, and record in Celery that its task will not run."""
        worker = self._transport.discard_handler
        try:
            # After twice as many lost consumers, the recording itself is taken to be what crashes them.
            if worker is not None and held.deliveries < 2 * self._transport.max_deliveries(message.queue):
                worker.deliver_discard(message, message.discard)
        finally:
            reason = message.discard.partition(":")[2]
            held.letter = dead_letter_record(held, message.headers, reason, self._transport.clock.wall())
            self.in_flight.add_outcome(ItemOutcome.GIVE_UP, held.tag)
            logger.error(
                "Message %s of queue %s becomes a dead letter: %d of its consumers were lost, the last one "
                "was %s. Replay it when the cause is mended.",
                held.letter[0],
                message.queue,
                held.deliveries,
                held.worker or "unknown",
                extra={"event": "zookeeper_message_dead_lettered"},
            )

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
            message = self._message(queue, held)
            if message is not None and message.discard:
                self._give_up(message, held)
            elif message is not None:
                if no_ack:
                    self.in_flight.add_outcome(ItemOutcome.ACK, held.tag)
                else:
                    self.qos.append(message, held.tag)
                return message
        return None

    def message_to_python(self, raw_message: Any) -> Any:
        """Return the message unchanged: the transport delivers message objects."""
        return raw_message

    # -- the end ---------------------------------------------------------------

    def close(self) -> None:
        """Requeue the messages that were not acknowledged, and leave the transient queues."""
        if self.closed:
            return
        transport = self._transport
        if not self._owner.is_current:
            # A forked child closes an inherited channel: the in-flight messages belong to the parent.
            self.closed = True
            transport.close_channel(self)
            return
        transients, self._transients = self._transients, set()
        super().close()
        transport.flush()
        for queue in transients:
            transport.leave(queue)
