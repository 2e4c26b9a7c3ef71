"""A Celery worker on a cluster: partitions, results by RPC, a singleton queue, dedup, quotas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer
from tests.brokers import BROKERS
from tests.conformance.celery_app import CeleryApp

PARTITIONS = 6


@pytest.fixture
def celery_app(
    redis_cluster: RedisCluster, redis_server: RedisServer, queue_name: str
) -> Iterator[CeleryApp]:
    opened = CeleryApp(
        BROKERS["cluster"],
        redis_server,
        queue_name,
        broker_port=redis_cluster.nodes[0].port,
        result_backend="rpc://",
        dq_queues={queue_name: {"partitions": PARTITIONS}},
        dq_singleton_queues=[f"{queue_name}-led"],
    )
    yield opened
    opened.close()


def test_the_life_of_a_worker(celery_app: CeleryApp, redis_cluster: RedisCluster) -> None:
    app, queue = celery_app.app, celery_app.queue
    api = app.dq.queues[queue]  # type: ignore[attr-defined]  # setup adds it
    first, again = (celery_app.send("add", 1, 1, tenant="acme", dedup={"key": "same"}) for _ in range(2))
    assert again.id == first.id
    app.dq.quotas.set(queue, "slow", rate="5/s", burst=1)  # type: ignore[attr-defined]  # as above
    slow = [celery_app.send("add", each, 3, tenant="slow") for each in range(4)]
    with celery_app.worker("threads", arguments=("-Q", f"{queue},{queue}-led")) as worker:
        results = [celery_app.send("add", each, 1, tenant=f"tenant-{each}") for each in range(30)]
        assert [each.get(timeout=30) for each in results] == [each + 1 for each in range(30)]
        assert first.get(timeout=30) == 2
        assert [each.get(timeout=30) for each in slow] == [each + 3 for each in range(4)]
        led = [celery_app.send("add", each, 2, queue=f"{queue}-led") for each in range(5)]
        assert [each.get(timeout=30) for each in led] == [each + 2 for each in range(5)]
        (leader,) = app.dq.leaders()  # type: ignore[attr-defined]  # as above
        assert (leader.name, leader.state) == (f"{queue}-led", "leads")
        assert celery_app.ask("ping") == {"ok": "pong"}
        assert worker.stop() == 0
    assert not any(each.held for each in api.snapshot().partitions)
