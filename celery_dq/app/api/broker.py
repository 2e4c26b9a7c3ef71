"""The app's broker connection, for ``app.dq``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from celery_dq.compat.kombu_publishing import library_errors
from celery_dq.context import AppContext
from celery_dq.errors import ConfigurationError
from celery_dq.inspector.redis_values import Client, check_text, text
from celery_dq.keys import queue_registry
from celery_dq.options.sections import Options
from celery_dq.transport.aliases import TENANT_SCHEMES, ZOOKEEPER_SCHEME
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.refusals import refusals_named


class OpenPartition(NamedTuple):
    """A queue's partition, and a client for its calls. Both are valid only inside the ``with`` block."""

    partition: Partition
    client: Client


class BrokerAccess:
    """Borrows connections from the app's pool. Thread-safe; a forked process gets new connections."""

    def __init__(self, app: Any, context: AppContext) -> None:
        self._app = app
        self._context = context

    @property
    def options(self) -> Options:
        """The app's checked settings."""
        options: Options = self._context.options
        return options

    @contextmanager
    def channel(self, connection: Any = None) -> Iterator[Any]:
        """Borrow a channel of the tenant broker.

        Raises:
            ConfigurationError: The app's broker is of another kind.
            kombu.exceptions.OperationalError: The broker cannot be reached, after the retries of
                ``task_publish_retry_policy``.
        """
        with self._channel(TENANT_SCHEMES, "dq-redis://…", connection) as channel:
            yield channel

    @contextmanager
    def zookeeper_channel(self) -> Iterator[Any]:
        """Borrow a channel of the ZooKeeper broker; raises the errors of :meth:`channel`."""
        with self._channel((ZOOKEEPER_SCHEME,), "dq-zookeeper://…") as channel:
            yield channel

    @contextmanager
    def _channel(self, schemes: tuple[str, ...], wanted: str, connection: Any = None) -> Iterator[Any]:
        with self._app.connection_or_acquire(connection) as borrowed:
            if borrowed.transport_cls not in schemes:
                raise ConfigurationError(_wrong_broker(borrowed, wanted))
            policy = self._app.conf.task_publish_retry_policy or {}
            known = ("max_retries", "interval_start", "interval_step", "interval_max")
            borrowed.ensure_connection(**{name: policy[name] for name in known if name in policy})
            with library_errors(borrowed), refusals_named():  # as Celery does when it publishes
                yield borrowed.default_channel

    @contextmanager
    def open(self, queue: str, connection: Any = None) -> Iterator[OpenPartition]:
        """Borrow a queue's partition.

        Raises:
            InvalidRequest: `queue` is not the name of a queue.
        """
        check_text("queue", queue)
        with self.channel(connection) as channel:
            yield OpenPartition(channel.partition(queue), channel.client)

    def serves_queues(self) -> bool:
        """Whether the app's broker is a tenant broker. Opens nothing."""
        url = self._app.connection_for_write()
        return url.transport_cls in TENANT_SCHEMES

    def is_zookeeper(self) -> bool:
        """Whether the app's broker is the one on ZooKeeper. Opens nothing."""
        url = self._app.connection_for_write()
        return bool(url.transport_cls == ZOOKEEPER_SCHEME)

    def declare(self, channel: Any, queue: str) -> None:
        """Register a queue that messages reach by another way than kombu."""
        channel.client.sadd(self._registry, queue)

    @property
    def _registry(self) -> str:
        options = self._context.options
        return queue_registry(options.environment, options.key_prefix)

    def queue_names(self) -> list[str]:
        """Return every queue that is declared in the app, named in ``dq_queues``, or known to the server."""
        options = self._context.options
        names = {*self._app.amqp.queues, *(section.name for section in options.queues)}
        if self.is_zookeeper():
            with self.zookeeper_channel() as channel:
                return sorted({*names, *channel.queue_names()})
        with self.channel() as channel:
            names.update(map(text, channel.client.smembers(self._registry)))
        return sorted(names)


def _wrong_broker(connection: Any, wanted: str) -> str:
    """The error text for a broker that cannot serve the request."""
    if connection.transport_cls == ZOOKEEPER_SCHEME:
        remedy = (
            "on ZooKeeper there are no tenants, quotas, moves and tombstones; 'celery dq queues', peek, "
            f"find, cancel, purge, dead, leaders and status work, and the rest needs broker_url = {wanted}"
        )
    else:
        remedy = f"set broker_url to {wanted}, or name the app that has it: celery -A shop dq …"
    return (
        f"app.dq needs the tenant broker for this, and this app's broker is {connection.as_uri()}: {remedy}"
    )
