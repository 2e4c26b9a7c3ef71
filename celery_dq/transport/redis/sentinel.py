"""The kombu transport for ``dq-sentinel://host:port;dq-sentinel://host:port/db``.

It connects to the master of a Sentinel group.
The transport option ``master_name`` is required; ``min_other_sentinels`` and ``sentinel_kwargs`` are those of
kombu.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_dq.errors import ConfigurationError
from celery_dq.transport.redis.bases import RedisSentinelChannel
from celery_dq.transport.redis.transport import Channel, Transport


class SentinelChannel(Channel, RedisSentinelChannel):
    """A channel whose connections go to the current master."""

    from_transport_options = RedisSentinelChannel.from_transport_options
    connection_class = RedisSentinelChannel.connection_class
    connection_class_ssl = RedisSentinelChannel.connection_class_ssl

    def _sentinel_managed_pool(self, asynchronous: bool = False) -> Any:
        if getattr(self, "master_name", None) is None:
            raise ConfigurationError(
                'dq-sentinel:// needs broker_transport_options = {"master_name": "…"}: the group to follow'
            )
        conninfo = self.connection.client
        alternatives = conninfo.alt
        # The retry is the next Sentinel of the list. With its own retries, redis-py would spend ten seconds
        # on a dead one.
        ours = {"socket_timeout": self.socket_timeout, "socket_connect_timeout": self.socket_connect_timeout}
        given = getattr(self, "sentinel_kwargs", None) or {}
        self.sentinel_kwargs = {**ours, "retry": Retry(NoBackoff(), 0), **given}
        # Kombu accepts only the literal scheme "sentinel".
        conninfo.alt = [url.replace("dq-sentinel://", "sentinel://", 1) for url in alternatives]
        try:
            return super()._sentinel_managed_pool(asynchronous)
        finally:
            conninfo.alt = alternatives

    def own_clients(self, timeout_s: float = math.inf) -> Callable[[], redis.Redis]:
        """Return a factory of clients for another thread; see the base class.

        A channel of kombu 5.7 closes the Sentinel connections of the pool that was made last. This pool is
        not the channel's: its thread may be reading from a Sentinel when the channel closes.
        """
        known = vars(self).get("_sentinel_manager")
        clients = super().own_clients(timeout_s)
        if "_sentinel_manager" in vars(self):
            self._sentinel_manager = known
        return clients


class SentinelTransport(Transport):
    """The kombu transport of the tenant broker behind Sentinel."""

    default_port = 26379
    Channel = SentinelChannel
