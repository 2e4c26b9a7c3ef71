"""Queues of several masters take turns in a worker that has no slot for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.cluster.test_cluster_consumers import queue_on_each_master
from tests.conformance.celery_app import CeleryApp

TASKS = 100


@pytest.fixture
def celery_app(redis_cluster: RedisCluster, redis_server: RedisServer) -> Iterator[CeleryApp]:
    opened = CeleryApp(BROKERS["cluster"], redis_server, broker_port=redis_cluster.nodes[0].port)
    yield opened
    opened.close()


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
