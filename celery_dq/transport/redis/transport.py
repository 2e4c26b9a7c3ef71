"""The kombu transport for ``dq-redis://`` and ``dq-rediss://``.

Connection string::

    dq-redis://[user:password@]host[:port][/db]
    dq-rediss://…                         (TLS; see ``broker_use_ssl``)
    dq-redis+socket:///path/to/redis.sock[?db=3&socket_timeout=5] (a unix socket)

Transport options are those of kombu's Redis transport that concern the connection: ``socket_timeout`` (15 s
here), ``socket_connect_timeout`` (5 s), ``socket_keepalive``, ``max_connections``, ``health_check_interval``,
``client_name``, ``fanout_prefix``, ``fanout_patterns``. ``global_keyprefix`` is refused, because it would
apply to some of the keys only: set ``dq_key_prefix``.

Features: direct, topic and fanout exchanges, priorities, ETA, expiry, remote control, batches.
"""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import redis

from celery_dq.errors import ConfigurationError
from celery_dq.shown import shown_logger, shown_name
from celery_dq.transport.bases import VirtualTransport
from celery_dq.transport.redis.bases import RedisTransport
from celery_dq.transport.redis.channel import Channel
from celery_dq.transport.redis.connection_context import ConnectionContext
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS
from celery_dq.transport.threaded_transport import ThreadedTransport

logger = shown_logger(__name__)


def _trust(wanted: Any) -> dict[str, Any]:
    """Return the TLS options when ``broker_use_ssl`` is True, or is not set beside ``dq-rediss://``."""
    if wanted:
        # broker_use_ssl = True trusts the certificate authorities of the system. Kombu would not encrypt.
        # Releases of redis-py before 6 do not compare the name of the host by themselves.
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
    # The default of kombu for rediss://, and as unsafe.
    logger.warning(
        "dq-rediss:// encrypts, but does not verify the certificate of the server, so any server is trusted. "
        'Set broker_use_ssl = {"ssl_cert_reqs": "required", "ssl_ca_certs": "…"}, or True for the system\'s '
        "authorities, or add ?ssl_cert_reqs=required&ssl_ca_certs=… to the URL.",
        extra={"event": "tls_without_verification"},
    )
    return {"ssl_cert_reqs": ssl.CERT_NONE}


def _refuse_unknown(options: Mapping[str, object]) -> None:
    """Refuse TLS options that redis-py would refuse with a ``TypeError`` at each connection.

    Raises:
        ConfigurationError: There is such an option.
    """
    makers = [maker for each in redis.SSLConnection.__mro__ if (maker := vars(each).get("__init__"))]
    known = {name for maker in makers for name in inspect.signature(maker).parameters}
    for name in sorted(str(each) for each in options if each not in known):
        close = get_close_matches(name, known, 1) or get_close_matches(f"ssl_{name}", known, 1)
        remedy = f"did you mean {close[0]!r}?" if close else "remove it."
        raise ConfigurationError(
            f"broker_use_ssl has no option {shown_name(name)!r}; {remedy} It takes the TLS options of "
            "redis-py, such as ssl_ca_certs, ssl_certfile, ssl_keyfile and ssl_password"
        )


class Cycle:
    """The part of kombu's poller that its Redis channels call."""

    _in_protected_read = False

    def __init__(self) -> None:
        self.after_read: set[Any] = set()

    def add(self, channel: Any) -> None:
        """Do nothing: the channel is consumed by a thread."""

    discard = add

    def close(self) -> None:
        """Do nothing: each channel ends its own part."""


class Transport(ThreadedTransport, RedisTransport):
    """The kombu transport of the tenant broker.

    Args:
        client: The kombu connection.
        **kwargs: Further arguments of kombu.
    """

    Channel = Channel
    #: Celery compares this name; mingle, gossip and --disable-prefetch depend on it.
    driver_type = "redis"
    driver_name = "redis"
    #: Without the KeyError of kombu 5.7: a message without a part raises one, and would end each connection.
    connection_errors = (
        *(each for each in RedisTransport.connection_errors if not issubclass(each, LookupError)),
        *PASSING_ERRORS,
    )
    #: Without this, kombu raises the second failure in a row despite the retry policy.
    recoverable_connection_errors = connection_errors
    implements = RedisTransport.implements.extend(asynchronous=True, batch_publish=True)
    supports_batch_publish = True

    def __init__(self, client: Any, **kwargs: Any) -> None:
        self.context = ConnectionContext(client)
        super().__init__(client, **kwargs)
        self.cycle = Cycle()
        # Kombu encrypts only with options, so a dict without any counts as one that is not set.
        if (client.ssl or client.transport_cls == "dq-rediss") and not (
            client.ssl and isinstance(client.ssl, dict)
        ):
            client.ssl = _trust(client.ssl)
        if client.ssl:
            _refuse_unknown(client.ssl)

    def start_fetcher(self) -> Any:
        """Do nothing: the thread starts with the first consumer."""

    def refuse_inherited(self) -> None:
        """Refuse to use a connection that was inherited through a fork; raises a connection error."""
        self.context.refuse_inherited()

    def acks_changed(self) -> None:
        """Deliver, if a message may be delivered now that an ack is pending or confirmed."""
        for channel in tuple(self.channels):
            consumer = channel.consumer
            if consumer.claims.has_queues and consumer.has_undelivered:
                self.wake_delivery()
                return

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """See the base class."""
        channels = tuple(self.channels)
        for channel in channels:
            channel.consumer.begin_asking()
        try:
            super().drain_events(connection, timeout)
        finally:
            for channel in channels:
                channel.consumer.is_asked = False

    def _deliver_all(self) -> None:
        for channel in tuple(self.channels):
            channel.tick()
            if channel.consumer.singleton_delivery is not None:
                channel.consumer.start_ready()
        super()._deliver_all()

    def _deliver_one(self) -> bool:
        for channel in tuple(self.channels):
            if channel.consumer.failure is not None or self._loop is None:
                channel.tick()
            if channel.consumer.deliver_one():
                if len(self.channels) > 1 and channel in self.channels:  # the callback may have closed it
                    self.channels.remove(channel)
                    self.channels.append(channel)
                return True
        return False

    def close_connection(self, connection: Any) -> None:
        """Close all channels."""
        self.context.identity.in_flight.remove_listener(self.acks_changed)
        VirtualTransport.close_connection(self, connection)
        self._waker.close()
        self._woken.close()

    def flush(self) -> None:
        """Do nothing: each channel waits for its own acks."""

    def _collect(self, connection: Any) -> None:
        """Close a lost connection without sending anything to the server."""
        for channel in (*self.channels, *self._avail_channels):
            channel.abandon()
        self.close_connection(connection)
