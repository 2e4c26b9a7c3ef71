"""``dq-redis://`` and ``dq-rediss://``.

Connection string::

    dq-redis://[user:password@]host[:port][/db]
    dq-rediss://…                         (TLS; see ``broker_use_ssl``)
    dq-redis+socket:///path/to/redis.sock[?db=3&socket_timeout=5] (a unix socket)

Transport options are those of kombu's Redis transport that concern the
connection: ``socket_timeout`` (15 s here), ``socket_connect_timeout`` (5 s),
``socket_keepalive``, ``max_connections``, ``health_check_interval``,
``client_name``, ``fanout_prefix``, ``fanout_patterns``. ``global_keyprefix``
is refused, because only some of the keys would get it: set ``dq_key_prefix``.

Features: direct, topic and fanout exchanges, priorities, ETA, expiry, remote
control, batches.
"""

from __future__ import annotations

import logging
import ssl
from typing import Any

from celery_dq.transport.bases import VirtualTransport
from celery_dq.transport.redis.bases import RedisTransport
from celery_dq.transport.redis.channel import Channel
from celery_dq.transport.redis.fitness import PASSING_ERRORS
from celery_dq.transport.redis.session import Session

logger = logging.getLogger(__name__)


def _trust(wanted: Any) -> dict[str, Any]:
    """Return whom to trust behind ``dq-rediss://`` when no dictionary says so."""
    if wanted:
        # broker_use_ssl = True: whoever the system's own authorities vouch for. Kombu would not encrypt.
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    # As kombu does for rediss://, and as unsafe.
    logger.warning(
        "dq-rediss:// without a word about trust: encrypted, but anybody may be at the other end. Set "
        'broker_use_ssl = {"ssl_cert_reqs": "required", "ssl_ca_certs": "…"}, or True for the system\'s '
        "authorities, or add ?ssl_cert_reqs=required&ssl_ca_certs=… to the URL."
    )
    return {"ssl_cert_reqs": ssl.CERT_NONE}


class Transport(RedisTransport):
    """Kombu's entry to the tenant broker."""

    Channel = Channel
    #: Celery asks for this name: mingle, gossip and --disable-prefetch depend on it.
    driver_type = "redis"
    driver_name = "redis"
    connection_errors = RedisTransport.connection_errors + PASSING_ERRORS
    #: Without these kombu takes a second failure in a row for good, whatever the retry policy says.
    recoverable_connection_errors = connection_errors
    implements = RedisTransport.implements.extend(asynchronous=True, batch_publish=True)
    supports_batch_publish = True

    def __init__(self, client: Any, **kwargs: Any) -> None:
        self.session = Session(client)
        super().__init__(client, **kwargs)
        self.cycle = self.session.poller
        if client.transport_cls == "dq-rediss" and not isinstance(client.ssl, dict):
            client.ssl = _trust(client.ssl)

    def qos_semantics_matches_spec(self, connection: Any) -> bool:
        """Say no, or Celery does not reduce the prefetch count after a reconnect."""
        return False

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Be driven by *loop* from now on."""
        self.session.poller.register(loop)

    def close_connection(self, connection: Any) -> None:
        """Close all channels; see :meth:`Channel.close`."""
        self.session.leave()
        VirtualTransport.close_connection(self, connection)
        self.session.poller.close()

    def _collect(self, connection: Any) -> None:
        """The connection is lost: close without talking to the server."""
        for channel in (*self.channels, *self._avail_channels):
            channel.abandon()
        self.close_connection(connection)
