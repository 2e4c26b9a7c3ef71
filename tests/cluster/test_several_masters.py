"""Tests of workers that consume from several masters of a cluster: concurrency, and turns of the queues."""

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
#: Tasks of each queue that take turns. So many that a thread that begins late has its share.
TASKS = 300


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


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_backlog_on_one_master_keeps_no_slot_from_another(
    celery_app: CeleryApp, redis_cluster: RedisCluster, pool: str
) -> None:
    queues = list(queue_on_each_master(redis_cluster).values())
    for _ in range(TASKS):
        for name in queues:
            celery_app.send("report", pool, name, queue=name)
    with celery_app.worker(pool, 1, queues=queues):
        wait_until(lambda: len(celery_app.witness.reports(pool)) == TASKS * len(queues), 60)
    ran = celery_app.witness.reports(pool)
    for name in queues:
        assert ran.index(name) < TASKS / 2
        # Had the queues run one after the other, the first one would end after a third.
        assert len(ran) - ran[::-1].index(name) > TASKS * 3 / 2
