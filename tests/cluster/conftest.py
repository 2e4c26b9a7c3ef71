"""Clients and connections of the shared cluster."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import redis
from kombu import Connection

from celery_dq.keys import PartitionKeys
from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.transport.redis.store.cluster_client import ClusterClient, cluster_pool
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from celery_dq.transport.redis.store.slot_map import SlotMap
from celery_dq.wiring import register_transports

_serial = count()


@pytest.fixture
def client(redis_cluster: RedisCluster) -> Iterator[ClusterClient]:
    slots = SlotMap(("127.0.0.1", node.port) for node in redis_cluster.nodes)
    opened = ClusterClient(connection_pool=cluster_pool(slots, redis.Connection, socket_timeout=20.0))
    yield opened
    opened.connection_pool.disconnect()


@pytest.fixture
def queue_name() -> str:
    return f"cluster-{next(_serial)}"


@pytest.fixture
def partition(queue_name: str) -> Partition:
    return Partition(PartitionKeys("online", queue_name, on_cluster=True), load_scripts(on_cluster=True))


@pytest.fixture
def connection(redis_cluster: RedisCluster) -> Iterator[Connection]:
    register_transports()
    with Connection(redis_cluster.url()) as opened:
        yield opened
