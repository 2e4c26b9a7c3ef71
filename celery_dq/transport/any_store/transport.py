"""The kombu transport and channel above any store; a subclass opens the store, and has its own scheme."""

from __future__ import annotations

import os
import socket
import uuid
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from celery_dq.context import AppContext
from celery_dq.errors import CorruptRecord, StoreUnreachable
from celery_dq.options import Options
from celery_dq.options.resolve import resolve
from celery_dq.per_process import PerProcess
from celery_dq.protocols import WorkerCapacity
from celery_dq.shown import shown_logger
from celery_dq.transport.any_store.fetcher import StoreConsumer, StoreFetcher, StoreQueue, StoreSource
from celery_dq.transport.any_store.queue_store import QueueStore, StoreClient
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.in_flight.message import Message, QoS
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.stamped_message import STAMPS, StampedMessage, stamp
from celery_dq.transport.threaded_channel import BindingTable, QueueDirectory, ThreadedChannel
from celery_dq.transport.threaded_transport import ThreadedTransport

__all__ = ["StoreChannel", "StoreTransport"]

logger = shown_logger(__name__)


class StoreChannel(ThreadedChannel):
    """A channel whose queues are in a store.

    Args:
        connection: The transport.
        **kwargs: Further arguments of kombu.
    """

    QoS = QoS

    def __init__(self, connection: StoreTransport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._transport = connection
        self._sequence = uuid.uuid4().hex
        self._numbers = count(1)

    @property
    def context(self) -> StoreTransport:
        """The state that all channels of the connection share."""
        return self._transport

    @property
    def in_flight(self) -> InFlightMessages:
        """The in-flight messages of the connection."""
        return self._transport.in_flight

    def running_tags(self) -> frozenset[str]:
        """Return the delivery tags of messages whose tasks the worker's pool runs or will run."""
        capacity = self._transport.capacity
        return capacity.running_tags() if capacity else frozenset()

    # -- publishing ------------------------------------------------------------

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        """Publish a message once per queue: the stamps of a failed attempt stay on the message."""
        self.refuse_closed()
        result = super().basic_publish(message, exchange, routing_key, **kwargs)
        message["properties"].pop(STAMPS, None)
        return result

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        now_us = int(self._transport.clock.wall() * 1e6)
        stamped = stamp(message, queue, self._sequence, lambda: next(self._numbers), now_us)
        self._transport.push(queue, stamped)
        self.published([queue])

    # -- consuming -------------------------------------------------------------

    def new_source(self, queue: str) -> StoreSource:
        """Make the source of a queue for this channel; nothing is claimed yet."""
        return self._transport.source_of(self, queue)

    def transient_bindings(self, queue: str) -> list[tuple[str, str]] | None:
        """Return exchange and routing key of each binding of a transient queue; None for a lasting one."""
        if not self.uses(queue):
            return None
        return [(each.exchange, each.routing_key) for each in self.state.queue_bindings(queue)]

    def room(self, source: Any) -> int:
        """How many messages to claim now; none while the worker stops.

        In a worker, tasks that run count against the prefetch count also after an early ack: a message that
        waits in the store may be overtaken by an urgent one, and one that waits here may not.
        """
        room, capacity, limit = super().room(source), self._transport.capacity, self.qos.prefetch_count
        if capacity is None:
            return room
        if capacity.closing:
            return 0
        return max(min(room, limit - len(self.in_flight)), 0) if limit else room

    def read_message(self, queue: str, claimed: tuple[ClaimedEntry, str]) -> Message | None:
        """Make the message; None for one that is released, lost or unreadable."""
        entry, tag = claimed
        held, capacity = self.in_flight.get(tag), self._transport.capacity
        if held is None:
            return None  # its lease was lost
        try:
            message = Message(MessageRecord.unpack(entry.record), entry, tag, queue, self)
        except CorruptRecord as why:
            logger.error(
                "Message %s of queue %s was moved to the dead letters: %s.",
                entry.id,
                queue,
                why,
                extra={"event": "unreadable_message_dead_lettered", "queue": queue},
            )
            self.in_flight.dead_letter(tag, f"unreadable: {why}", entry.record)
            return None
        if (capacity is not None and capacity.closing) or not message.may_deliver():
            self.in_flight.release(tag, "unstarted")
            return None
        message.started = held.delivered = capacity is None
        return message

    @property
    def in_worker(self) -> bool:
        """Whether this process is a worker."""
        return self._transport.capacity is not None

    def discard(self, message: Message, claimed: tuple[ClaimedEntry, str]) -> None:
        """Let Celery do its bookkeeping for a message that must not run, and finish it."""
        capacity = self._transport.capacity
        self.qos.append(message, message.delivery_tag)
        if capacity is not None and capacity.deliver_discard(message, message.discard):
            return
        logger.info(
            "Message %s of queue %s was discarded without running: %s.",
            message.message_id,
            message.queue,
            message.discard,
            extra={"event": "message_discarded", "queue": message.queue, "reason": message.discard},
        )
        self.qos.finish(message.delivery_tag)

    def finish_unacked(self, delivery_tag: str) -> None:
        """Finish a message for a consumer without acknowledgements."""
        self.in_flight.finish(delivery_tag)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return one message at once, or None. Expired and unreadable messages are passed over."""
        self._transport.refuse_inherited()
        while claimed := self._transport.take_one(queue):
            message = self.read_message(queue, claimed[0])
            if message is not None and message.discard:
                self.discard(message, claimed[0])
            elif message is not None:
                if no_ack:
                    self.in_flight.finish(message.delivery_tag)
                else:
                    self.qos.append(message, message.delivery_tag)
                return message
        return None

    # -- acknowledging ---------------------------------------------------------

    def send_acks_now(self) -> None:
        """Let the fetcher send the pending acks."""
        self._transport.look_again()

    def requeue_transient(self, message: Any) -> None:
        """Do nothing: messages of transient queues are released like all others."""


class OpenStore(NamedTuple):
    """The client of a transport in one process, for its publishers and declarations."""

    client: StoreClient
    queues: QueueDirectory
    bindings: BindingTable


class StoreTransport(ThreadedTransport):
    """A transport whose queues are in a store.

    A subclass sets ``driver_type`` and ``driver_name``, adds the store's errors to ``connection_errors``, and
    opens the store by :meth:`open_store`.

    Args:
        client: The kombu connection.
        **kwargs: Further arguments of kombu.

    Raises:
        ConfigurationError: The URL or a setting cannot be used.
    """

    Channel = StoreChannel
    #: The worker tracks the life of each task for the lease, as it does on the tenant broker.
    leases_messages = True
    connection_errors = (*ThreadedTransport.connection_errors, StoreUnreachable)
    channel_errors = (*ThreadedTransport.channel_errors,)

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._app_context = AppContext.of(client)
        self.options: Options = resolve({}) if self._app_context is None else self._app_context.options
        self._store: QueueStore[Any] = self.open_store()
        self._open = PerProcess(self._connect)
        self.in_flight = InFlightMessages(self.clock, self.options.lease_us / 1e6)
        self._consumer: StoreConsumer | None = None

    def open_store(self) -> QueueStore[Any]:
        """Return the store that the URL of ``self.client`` names; opens no connection."""
        raise NotImplementedError

    def unusable(self, reason: str) -> StoreUnreachable:
        """Make the error for a connection that cannot be used any more."""
        return StoreUnreachable(reason)

    # -- the store -----------------------------------------------------------------

    def _connect(self) -> OpenStore:
        client = self._store.connect()
        return OpenStore(client, self._store.queues(client), self._store.bindings(client))

    @property
    def queues(self) -> QueueDirectory:
        """The queues of the store."""
        return self._open.get().queues

    @property
    def bindings(self) -> BindingTable:
        """The bindings of the store."""
        return self._open.get().bindings

    @property
    def capacity(self) -> WorkerCapacity | None:
        """The capacity of the worker in this process; None without a worker."""
        return None if self._app_context is None else self._app_context.capacity

    def establish_connection(self) -> Any:
        """Open the store; raises its errors."""
        self._open.get()
        return super().establish_connection()

    def verify_connection(self, connection: Any) -> bool:
        """Whether the connection can be used: no claim has failed."""
        return self._fetcher is None or self._fetcher.failure is None

    def close_connection(self, connection: Any) -> None:
        """Close all channels, release their messages, and end the leases."""
        super().close_connection(connection)
        opened = self._open.peek()
        if opened is not None:
            self._open = PerProcess(self._connect)
            opened.client.close()

    def push(self, queue: str, stamped: StampedMessage) -> None:
        """Store a message, once."""
        call = self._store.partition(queue).push([stamped.outgoing], producer=stamped.sequence)
        call.run(self._open.get().client)

    # -- consuming -----------------------------------------------------------------

    def new_fetcher(self) -> StoreFetcher:
        """Make the fetcher, with a consumer name of its own."""
        lease_s = self.options.lease_us / 1e6
        self.in_flight = InFlightMessages(self.clock, lease_s)
        worker = self._app_context.worker if self._app_context is not None else ""
        name = f"{worker or socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self._consumer = StoreConsumer(name, lease_s, self.in_flight, self._started_tags)
        return StoreFetcher(self._store, self._consumer, self.clock, self.room, self.wake_delivery)

    def _started_tags(self) -> frozenset[str]:
        capacity = self.capacity
        return frozenset() if capacity is None else capacity.started_tags()

    def _queue(self, name: str) -> StoreQueue:
        return StoreQueue(name, self._store.partition(name), self.options.queue(name).max_deliveries)

    def source_of(self, channel: StoreChannel, queue: str) -> StoreSource:
        """Make the source of *queue* for *channel*."""
        fetcher: StoreFetcher = self.start_fetcher()
        bindings = partial(channel.transient_bindings, queue)
        return StoreSource(self._queue(queue), self.in_flight, fetcher.wake, bindings)

    def take_one(self, queue: str) -> list[tuple[ClaimedEntry, str]]:
        """Claim one message of *queue* now; an empty list if none is available."""
        fetcher: StoreFetcher = self.start_fetcher()
        target = self._queue(queue)
        fetcher.keep_lease(target)
        # A message that was requeued before this call is in its place then.
        fetcher.flush()
        if fetcher.failure is not None or self._consumer is None:
            raise self.unusable(str(fetcher.failure))
        sent_at = self.clock.monotonic()
        reply = target.partition.claim(
            self._consumer.name,
            lease_ms=self._consumer.lease_ms,
            want=1,
            max_deliveries=target.max_deliveries,
        ).run(self._open.get().client)
        return self._consumer.received(target, reply, sent_at)
