"""Dedup in workers without an event loop, whose pools switch between greenlets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dq.testing.servers import RedisServer
from tests.dedup.dedup_workers import DedupWorkers


@pytest.fixture(params=["dq-redis", "redis"])
def crew(request: pytest.FixtureRequest, redis_url: str, redis_server: RedisServer) -> Iterator[DedupWorkers]:
    redis_server.flush(0)
    crew = DedupWorkers(redis_url.replace("redis:", f"{request.param}:"), redis_url, redis_server.url(0))
    # Long enough that a call that is not woken at once is late.
    crew.conf["dq_lease"] = 30.0
    yield crew
    crew.close()
    redis_server.flush(0)


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_one_runs_one_waits_and_goes_on_when_the_first_has_ended(crew: DedupWorkers, pool: str) -> None:
    worker = crew.worker(pool=pool).wait_ready()
    results = [crew.send("early", 1)]
    crew.ran(1)
    results += [crew.send("early", version) for version in (2, 3, 4)]
    # Waiting calls hold no slot of the pool: another key runs at once.
    other = crew.app.tasks["early"].apply_async((2, 9))
    crew.ran(2)
    crew.witness.rpush("door:2", "go")
    assert other.get(timeout=40) == [2, 9]
    crew.open(2)
    assert [result.get(timeout=40) for result in results] == [[1, 1], [1, 2], [1, 2], [1, 2]]
    assert crew.ran(3) == ["1", "9", "2"]
    assert crew.meetings() == 0
    assert "Traceback" not in worker.log
