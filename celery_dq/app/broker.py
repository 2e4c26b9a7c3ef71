"""The app's own broker connection, as the face of the queues needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from celery_dq.errors import ConfigurationError
from celery_dq.hooks import Wires
from celery_dq.inspector.reading import Client, text
from celery_dq.keys import queue_registry
from celery_dq.transport.aliases import TENANT_SCHEMES, ZOOKEEPER_SCHEME
from celery_dq.transport.redis.partition import Partition


class Opened(NamedTuple):
    """A queue's partition, and a client to run its calls on; both only inside the ``with``."""

    partition: Partition
    client: Client


class Broker:
    """Borrows connections from the app's pool: safe between threads, made anew after a fork."""

    def __init__(self, app: Any, wires: Wires) -> None:
        self._app = app
        self._wires = wires

    @contextmanager
    def channel(self, connection: Any = None) -> Iterator[Any]:
        """Borrow a channel of the tenant broker.

        Raises:
            ConfigurationError: The app's broker is another one.
            kombu.exceptions.OperationalError: It cannot be reached, after the retries of
                ``task_publish_retry_policy``.
        """
        with self._channel("partition", "dq-redis://…", connection) as channel:
            yield channel

    @contextmanager
    def zookeeper_channel(self) -> Iterator[Any]:
        """Borrow a channel of the ZooKeeper broker; raises as :meth:`channel`."""
        with self._channel("graveyard", "dq-zookeeper://…") as channel:
            yield channel

    @contextmanager
    def _channel(self, trait: str, wanted: str, connection: Any = None) -> Iterator[Any]:
        with self._app.connection_or_acquire(connection) as borrowed:
            policy = self._app.conf.task_publish_retry_policy or {}
            known = ("max_retries", "interval_start", "interval_step", "interval_max")
            borrowed.ensure_connection(**{name: policy[name] for name in known if name in policy})
            with borrowed._reraise_as_library_errors():  # as Celery does when it publishes
                channel = borrowed.default_channel
                if not hasattr(channel, trait):
                    raise ConfigurationError(
                        f"app.dq needs a broker of celery-dq for this, and this app's is {borrowed.as_uri()}:"
                        f" set broker_url to {wanted}"
                    )
                yield channel

    @contextmanager
    def open(self, queue: str, connection: Any = None) -> Iterator[Opened]:
        """Borrow a queue's partition."""
        with self.channel(connection) as channel:
            yield Opened(channel.partition(queue), channel.client)

    def serves_queues(self) -> bool:
        """Whether the app's broker is a tenant broker. Opens nothing."""
        url = self._app.connection_for_write()
        return url.transport_cls in TENANT_SCHEMES

    def is_zookeeper(self) -> bool:
        """Whether the app's broker is that on ZooKeeper. Opens nothing."""
        url = self._app.connection_for_write()
        return bool(url.transport_cls == ZOOKEEPER_SCHEME)

    def declare(self, channel: Any, queue: str) -> None:
        """Make a queue known that messages reach otherwise than by kombu."""
        channel.client.sadd(self._registry, queue)

    @property
    def _registry(self) -> str:
        options = self._wires.options
        return queue_registry(options.environment, options.key_prefix)

    def queue_names(self) -> list[str]:
        """Return every queue that is declared in the app, named in ``dq_queues``, or known to the server."""
        options = self._wires.options
        names = {*self._app.amqp.queues, *(section.name for section in options.queues)}
        if self.is_zookeeper():
            with self.zookeeper_channel() as channel:
                return sorted({*names, *channel.queue_names()})
        with self.channel() as channel:
            names.update(map(text, channel.client.smembers(self._registry)))
        return sorted(names)
