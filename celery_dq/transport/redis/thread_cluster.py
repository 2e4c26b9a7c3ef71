"""The transports of a Redis Cluster and of Sentinel, consumed by a thread."""

from __future__ import annotations

from celery_dq.transport.redis.cluster import ClusterChannel, ClusterTransport
from celery_dq.transport.redis.thread_transport import ThreadChannel, ThreadTransport


class ClusterThreadChannel(ThreadChannel, ClusterChannel):
    """A channel whose partitions are spread over the nodes of a cluster."""


class ClusterThreadTransport(ThreadTransport, ClusterTransport):
    """The kombu transport of the tenant broker on a Redis Cluster."""

    Channel = ClusterThreadChannel
