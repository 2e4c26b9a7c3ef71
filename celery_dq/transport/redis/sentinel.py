"""``dq-sentinel://host:port;dq-sentinel://host:port/db``: the master of a Sentinel group.

The transport option ``master_name`` is required; ``min_other_sentinels`` and
``sentinel_kwargs`` are those of kombu.
"""

from __future__ import annotations

from typing import Any

from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_dq.errors import ConfigurationError
from celery_dq.transport.redis.bases import RedisSentinelChannel
from celery_dq.transport.redis.channel import Channel
from celery_dq.transport.redis.transport import Transport


class SentinelChannel(Channel, RedisSentinelChannel):
    """A channel whose connections go to whoever is master now."""

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
        # The next Sentinel of the list is the retry; redis-py would ask a dead one for ten seconds.
        ours = {"socket_timeout": self.socket_timeout, "socket_connect_timeout": self.socket_connect_timeout}
        given = getattr(self, "sentinel_kwargs", None) or {}
        self.sentinel_kwargs = {**ours, "retry": Retry(NoBackoff(), 0), **given}
        # Kombu looks for the scheme "sentinel" literally.
        conninfo.alt = [url.replace("dq-sentinel://", "sentinel://", 1) for url in alternatives]
        try:
            return super()._sentinel_managed_pool(asynchronous)
        finally:
            conninfo.alt = alternatives


class SentinelTransport(Transport):
    """Kombu's entry to the tenant broker behind Sentinel."""

    default_port = 26379
    Channel = SentinelChannel
