"""The kombu transport above any store: a subclass opens the store, and is registered by its scheme."""

from __future__ import annotations

import os
import socket
import uuid
from functools import partial
from typing import Any, NamedTuple

from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.errors import ConfigurationError, StoreUnreachable
from celery_dq.options import Options
from celery_dq.options.resolve import resolve
from celery_dq.per_process import PerProcess
from celery_dq.protocols import WorkerCapacity
from celery_dq.transport.any_store.channel import StoreChannel
from celery_dq.transport.any_store.fetcher import StoreConsumer, StoreFetcher, StoreQueue, StoreSource
from celery_dq.transport.any_store.queue_store import QueueStore, StoreClient
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.stamped_message import StampedMessage
from celery_dq.transport.threaded_channel import BindingTable, QueueDirectory
from celery_dq.transport.threaded_transport import ThreadedTransport

__all__ = ["StoreTransport"]


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
        self._app_context = _app_context_of(client)
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


def _app_context_of(client: Any) -> AppContext | None:
    context = client.transport_options.get(APP_CONTEXT)
    if context is not None and not isinstance(context, AppContext):
        raise ConfigurationError(
            f"transport_options[{APP_CONTEXT!r}] = {context!r} is set by celery-dq: remove it"
        )
    return context
