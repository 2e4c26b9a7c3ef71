"""The kombu transport for ``dq-rediscluster://``.

Connection string::

    dq-rediscluster://[user:password@]host[:port][,host[:port]…]

The hosts are some nodes of the cluster, which name the others. The transport options are those of
``dq-redis://``, TLS is ``broker_use_ssl``. Redis or Valkey 7 or later, and redis-py 8 or later.

Each partition has all of its keys in one slot, so that one script may use them. All bindings share another
slot. Broadcasts (remote control and events) go through the node that has the slot of kombu's mailbox.
"""

from __future__ import annotations

from typing import Any

import redis

from celery_dq.errors import ConfigurationError
from celery_dq.transport.broker_url import take_apart
from celery_dq.transport.redis.transport import Channel

if redis.VERSION < (8,):
    raise ImportError(
        f"dq-rediscluster:// needs redis-py 8 or later, and {redis.__version__} is installed: "
        "pip install 'celery-dq[cluster]'"
    )

from celery_dq.transport.redis.consuming.sharded_wakeups import ShardedWakeups
from celery_dq.transport.redis.store.cluster_client import ClusterClient, cluster_pool
from celery_dq.transport.redis.transport import Transport


class ClusterChannel(Channel):
    """A channel whose partitions are spread over the nodes of a cluster."""

    wakeups_class = ShardedWakeups
    # Kombu's scripts for bindings name two keys, so all of them share a slot.
    keyprefix_queue = "{_kombu}.binding.%s"
    keyprefix_binding_permanent = "{_kombu}.binding_permanent.%s"
    keyprefix_binding_deadlines = "{_kombu}.binding_deadlines"

    def _get_client(self) -> type[redis.Redis]:
        return ClusterClient

    def _get_pool(self, asynchronous: bool = False) -> redis.ConnectionPool:
        params = self._connparams(asynchronous=asynchronous)
        if params["db"]:
            raise ConfigurationError(
                f"broker_url ends in /{params['db']}, but a Redis Cluster has only database 0: leave it out, "
                "and set dq_key_prefix to separate applications"
            )
        self.keyprefix_fanout: str = self.keyprefix_fanout.format(db=0)
        for name in ("host", "port", "db"):
            del params[name]
        slots = self.identity.slots
        assert slots is not None
        return cluster_pool(slots, params.pop("connection_class"), **params)


class ClusterTransport(Transport):
    """The kombu transport of the tenant broker on a Redis Cluster."""

    Channel = ClusterChannel
    can_parse_url = True

    def __init__(self, client: Any, **kwargs: Any) -> None:
        take_apart(client)
        super().__init__(client, **kwargs)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL of the broker with a masked password; urllib cannot parse a list of hosts."""
        client = self.client
        credentials = ""
        if client.userid or client.password:
            credentials = f"{client.userid or ''}:{client.password if include_password else mask}@"
        return f"{client.transport_cls}://{credentials}{client.hostname}"
