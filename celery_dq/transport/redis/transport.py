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

import logging
import ssl
from typing import Any

from celery_dq.transport.bases import VirtualTransport
from celery_dq.transport.redis.bases import RedisTransport
from celery_dq.transport.redis.channel import Channel
from celery_dq.transport.redis.connection_context import ConnectionContext
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS

logger = logging.getLogger(__name__)


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


class Transport(RedisTransport):
    """The kombu transport of the tenant broker.

    Args:
        client: The kombu connection.
        **kwargs: Further arguments of kombu.
    """

    Channel = Channel
    context_class = ConnectionContext
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
        self.context = self.context_class(client)
        super().__init__(client, **kwargs)
        self.cycle = self.context.poller
        # Kombu encrypts only with options, so a dict without any counts as one that is not set.
        if (client.ssl or client.transport_cls == "dq-rediss") and not (
            client.ssl and isinstance(client.ssl, dict)
        ):
            client.ssl = _trust(client.ssl)

    def qos_semantics_matches_spec(self, connection: Any) -> bool:
        """Return False, so that Celery reduces the prefetch count after a reconnect."""
        return False

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Let the event loop *loop* drive this transport from now on."""
        self.context.poller.register(loop)

    def close_connection(self, connection: Any) -> None:
        """Close all channels; see :meth:`Channel.close`."""
        self.context.unregister_consumer()
        VirtualTransport.close_connection(self, connection)
        self.context.poller.close()

    def _collect(self, connection: Any) -> None:
        """Close a lost connection without sending anything to the server."""
        for channel in (*self.channels, *self._avail_channels):
            channel.abandon()
        self.close_connection(connection)
