"""What a worker promises for one server holds over all masters of a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from celery_dq.inspector.queues import queue_snapshots
from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.cluster_client import ClusterClient
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.brokers import BROKERS
from tests.cluster.test_cluster_consumers import keys_of, queue_on_each_master
from tests.conformance.celery_app import CeleryApp

#: Seconds for which the messages in flight are counted.
COUNTED_S = 2.0
CONCURRENCY = 4


@pytest.fixture
def celery_app(redis_cluster: RedisCluster, redis_server: RedisServer) -> Iterator[CeleryApp]:
    opened = CeleryApp(BROKERS["cluster"], redis_server, broker_port=redis_cluster.nodes[0].port)
    yield opened
    opened.close()


def test_concurrency_holds_over_all_masters(
    celery_app: CeleryApp, redis_cluster: RedisCluster, client: ClusterClient
) -> None:
    queues = list(queue_on_each_master(redis_cluster).values())
    scripts = load_scripts(on_cluster=True)
    partitions = [[Partition(keys_of(name), scripts)] for name in queues]

    def held() -> list[int]:
        return [each.held for each in queue_snapshots(partitions, client, ages=False)]

    witness, most, fewest = celery_app.witness, 0, 12
    with (
        celery_app.worker("threads", CONCURRENCY, queues=queues),
        celery_app.worker("threads", CONCURRENCY, queues=queues, name="w2"),
    ):
        for name in queues * 2:
            celery_app.send("hold_late", "all", queue=name)
        wait_until(lambda: len(witness.reports("started:all")) == 6, 30)
        for name in queues * 2:
            celery_app.send("hold_late", "all", queue=name)
        wait_until(lambda: len(witness.reports("started:all")) == 2 * CONCURRENCY, 30)
        begun_at = time.monotonic()
        # No worker claims more than it can run.
        while time.monotonic() < begun_at + COUNTED_S:
            now = held()
            most, fewest = max(most, sum(now)), min(fewest, *now)
        assert most == 2 * CONCURRENCY
        assert fewest >= 2
        assert len(witness.reports("started:all")) == 2 * CONCURRENCY
        witness.release("all", 12)
        wait_until(lambda: len(witness.reports("finished:all")) == 12, 30)
    assert len(set(witness.reports("finished:all"))) == 12
