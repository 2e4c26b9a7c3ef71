"""The context that all channels of one connection share."""

from __future__ import annotations

from typing import Any

import redis

from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.errors import ConfigurationError
from celery_dq.keys import PartitionKeys, queue_registry, transient_prefix
from celery_dq.options.resolve import resolve
from celery_dq.options.sections import Options
from celery_dq.protocols import Leaderships, WorkerCapacity
from celery_dq.transport.redis.consuming.poller import Poller
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.address import identity
from celery_dq.transport.redis.store.full_server import read_together
from celery_dq.transport.redis.store.partition import STRICT_PRIORITY_US, Partition
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.server_checks import check_server


class ConnectionContext:
    """App and process of one transport.

    Args:
        connection: The kombu connection. Its transport options hold the :class:`AppContext` of the app, if
            there
            is an app.

    Raises:
        ConfigurationError: A transport option or a setting cannot be used.
    """

    def __init__(self, connection: Any) -> None:
        prefix = connection.transport_options.get("global_keyprefix")
        if prefix:
            raise ConfigurationError(
                f"broker_transport_options['global_keyprefix'] = {prefix!r} would reach only some of the "
                "keys: set dq_key_prefix instead"
            )
        self._app_context = _app_context_of(connection)
        #: Whether an app with settings uses the connection; plain kombu has only defaults.
        self.has_settings = APP_CONTEXT in connection.transport_options
        self.options: Options = self._app_context.options
        self.address = identity(connection)
        processes = self._app_context.in_process(dict[str, ConsumerIdentity])
        process = processes.get(self.address)
        if process is None:
            process = processes[self.address] = ConsumerIdentity(self.options.lease_us / 1e6)
        self.process: ConsumerIdentity = process
        process.running_tags = self._running_tags
        self.poller = Poller(process.clock)

    @property
    def capacity(self) -> WorkerCapacity | None:
        """Capacity of the worker in this process; None without a worker."""
        return self._app_context.capacity

    @property
    def leaderships(self) -> Leaderships | None:
        """Leaderships of the worker in this process; None without any."""
        return self._app_context.leaderships

    def _running_tags(self) -> frozenset[str]:
        capacity = self.capacity
        return frozenset() if capacity is None else capacity.started_tags()

    def check_server(self, client: redis.Redis) -> None:
        """Check, once per process, that the server may hold messages.

        Raises:
            ServerError: The server may not hold messages.
        """
        process = self.process
        if self.address not in process.checked_servers:
            check_server(client, self.options.allow_eviction)
            process.checked_servers.add(self.address)

    def refuse_inherited(self) -> None:
        """Refuse a connection that this process has inherited over a fork, with the identity of its parent.

        Raises:
            redis.ConnectionError: The connection was opened before a fork.
        """
        if not self.process.owner.is_current:
            raise redis.ConnectionError(
                "This connection was opened before a fork: open a new one in the child process"
            )

    def register_consumer(self) -> None:
        """Send pending acks over this connection from now on."""
        self.process.in_flight.add_listener(self.poller.wake)

    def unregister_consumer(self) -> None:
        """Undo :meth:`register_consumer`."""
        self.process.in_flight.remove_listener(self.poller.wake)

    @property
    def broadcast_prefix(self) -> str:
        """Prefix that separates broadcasts and bindings from those of other apps on the same database.

        Empty with default settings, so that monitors made for kombu find the worker.
        """
        options = self.options
        if options.environment == "online" and not options.key_prefix:
            return ""
        return f"{options.key_prefix}{options.environment}/"

    @property
    def registry_key(self) -> str:
        """Key of the SET with the names of all ordinary queues that were declared."""
        return queue_registry(self.options.environment, self.options.key_prefix)

    @property
    def list_prefix(self) -> str:
        """Prefix of the keys of transient queues."""
        return transient_prefix(self.options.environment, self.options.key_prefix)

    def queue(self, name: str) -> Queue:
        """Return the queue called *name* as the options describe it."""
        options = self.options.queue(name)
        keys = PartitionKeys(self.options.environment, name, 0, self.options.key_prefix)
        aging = options.priority_aging_us
        return Queue(
            name,
            Partition(keys, self.process.scripts),
            max_deliveries=options.max_deliveries,
            head_start_us=STRICT_PRIORITY_US if aging is None else aging,
        )

    @staticmethod
    def waiting_count(client: redis.Redis, partition: Partition) -> int:
        """Return how many messages wait. Messages in flight, delayed or cancelled do not count."""
        keys = partition.keys
        stored, delayed, discards, held = read_together(
            client,
            [
                ("HLEN", keys.messages),
                ("ZCARD", keys.delayed),
                ("ZCARD", keys.discards),
                ("HGET", keys.state, "held"),
            ],
        )
        return max(int(stored) - int(delayed) - int(discards) - int(held or 0), 0)


def _app_context_of(connection: Any) -> AppContext:
    context = connection.transport_options.get(APP_CONTEXT)
    if context is None:
        # In plain kombu, the connection keeps the context, because it outlives its transports.
        context = connection.__dict__.get("_dq_context")
        if context is None:
            context = connection.__dict__["_dq_context"] = AppContext("dq", lambda: resolve({}))
    if not isinstance(context, AppContext):
        raise ConfigurationError(f"transport_options[{APP_CONTEXT!r}] is celery-dq's own: remove {context!r}")
    return context
