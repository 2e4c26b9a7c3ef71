"""The kombu transport and channel above any store; a subclass opens the store, and has its own scheme."""

from __future__ import annotations

import os
import socket
import uuid
from itertools import count
from typing import Any, NamedTuple

from celery_dq.errors import CorruptRecord, StoreUnreachable
from celery_dq.per_process import PerProcess
from celery_dq.protocols import WorkerCapacity
from celery_dq.shown import shown_logger
from celery_dq.transport.any_store.fetcher import Claimed, StoreFetcher, StoreQueue, StoreSubscription
from celery_dq.transport.any_store.queue_store import QueueStore, StoreClient
from celery_dq.transport.fetcher import QueueSubscription
from celery_dq.transport.in_flight import InFlightMessages, Message, QoS
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.packer import StampedMessage
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
    _transport: StoreTransport

    def __init__(self, connection: StoreTransport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._sequence = uuid.uuid4().hex
        self._numbers = count(1)

    @property
    def context(self) -> StoreTransport:
        """The state that all channels of the connection share."""
        return self._transport

    def running_tags(self) -> frozenset[str]:
        """Return the delivery tags of messages whose tasks the worker's pool runs or will run."""
        capacity = self._transport.worker
        return capacity.running_tags() if capacity else frozenset()

    # -- publishing ------------------------------------------------------------

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        self._transport.push(self._transport.packer.stamp(message, queue, self._sequence, self._numbers))
        self.published([queue])

    # -- consuming -------------------------------------------------------------

    def room(self, subscription: QueueSubscription) -> int:
        """How many messages to claim now; none while the worker stops.

        In a worker, tasks that run count against the prefetch count also after an early ack: a message that
        waits in the store may be overtaken by an urgent one, and one that waits here may not.
        """
        room, capacity, limit = super().room(subscription), self._transport.worker, self.qos.prefetch_count
        if capacity is None:
            return room
        if capacity.closing:
            return 0
        return max(min(room, limit - len(self.in_flight)), 0) if limit else room

    def read_message(self, queue: str, claimed: Claimed) -> Message | None:
        """Make the message; None for one that is released, lost or unreadable."""
        entry, tag = claimed
        held, capacity = self.in_flight.get(tag), self._transport.worker
        if held is None:
            return None  # its lease was lost
        try:
            message = Message(MessageRecord.unpack(entry.record), entry, tag, queue, self)
        except CorruptRecord as why:
            self.qos.dead_letter_unreadable(queue, entry, tag, why)
            return None
        if (capacity is not None and capacity.closing) or not message.may_deliver():
            self.in_flight.release(tag, "unstarted")
            return None
        message.started = held.delivered = capacity is None
        return message

    def discard(self, message: Message) -> None:
        """Let Celery do its bookkeeping for a message that must not run, and finish it."""
        capacity = self._transport.worker
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
    unusable = StoreUnreachable
    connection_errors = (*ThreadedTransport.connection_errors, StoreUnreachable)
    channel_errors = (*ThreadedTransport.channel_errors,)

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._store: QueueStore[Any] = self.open_store()
        self._open = PerProcess(self._connect)
        self.in_flight = InFlightMessages(self.clock, self.options.lease_us / 1e6)

    def open_store(self) -> QueueStore[Any]:
        """Return the store that the URL of ``self.client`` names; opens no connection."""
        raise NotImplementedError

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
    def worker(self) -> WorkerCapacity | None:
        """The capacity of the worker in this process; None without a worker."""
        return self._app_context.capacity

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

    def push(self, stamped: StampedMessage) -> None:
        """Store a message, once."""
        call = self._store.partition(stamped.queue).push([stamped.outgoing], producer=stamped.sequence)
        call.run(self._open.get().client)

    # -- consuming -----------------------------------------------------------------

    def new_fetcher(self) -> StoreFetcher:
        """Make the fetcher, with a consumer name of its own."""
        lease_s = self.options.lease_us / 1e6
        self.in_flight = InFlightMessages(self.clock, lease_s)
        consumer = f"{self._app_context.worker or socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        return StoreFetcher(
            self._store, consumer, lease_s, self.in_flight, self._started_tags, self.clock, self.wake_delivery
        )

    def _started_tags(self) -> frozenset[str]:
        capacity = self.worker
        return frozenset() if capacity is None else capacity.started_tags()

    def _queue(self, name: str) -> StoreQueue:
        return StoreQueue(name, self._store.partition(name), self.options.queue(name).max_deliveries)

    def subscribe(self, channel: StoreChannel, queue: str) -> StoreSubscription:
        """Make the subscription of a channel to a queue; nothing is claimed yet."""
        return StoreSubscription(self._queue(queue), channel, self.start_fetcher().wake)

    def claim_one(self, fetcher: StoreFetcher, queue: str) -> list[Claimed]:
        """Claim one message of *queue*, if one is available."""
        return fetcher.take_one(self._queue(queue), self._open.get().client)
