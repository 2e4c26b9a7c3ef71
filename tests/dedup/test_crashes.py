"""Workers that die while they hold a dedup lock: the next call runs, and no two runs overlap."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from celery_dq.dedup.machine import Verdict
from celery_dq.testing.servers import RedisServer
from tests.dedup.dedup_workers import DedupWorkers, kill
from tests.workers import WorkerProcess


@pytest.fixture
def crew(redis_url: str, redis_server: RedisServer) -> Iterator[DedupWorkers]:
    redis_server.flush(0)
    crew = DedupWorkers(redis_url.replace("redis://", "dq-redis://"), redis_url, redis_server.url(0))
    yield crew
    crew.close()
    redis_server.flush(0)


def start_two(crew: DedupWorkers, task: str) -> tuple[WorkerProcess, Any]:
    """Start two workers; return the one that runs the head, and the result of the tail behind it."""
    for worker in [crew.worker("w1"), crew.worker("w2")]:
        worker.wait_ready(60)
    return begin(crew, task)


def begin(crew: DedupWorkers, task: str) -> tuple[WorkerProcess, Any]:
    crew.send(task, 1)
    crew.ran(1)
    tail = crew.send(task, 2)
    assert tail.verdict is Verdict.BLOCK
    return crew.who_runs(), tail


def test_a_killed_worker_whose_task_was_acknowledged(crew: DedupWorkers) -> None:
    first, tail = start_two(crew, "early")
    kill(first)
    crew.left()
    crew.open(2)
    assert tail.get(timeout=40) == [1, 2]
    assert crew.ran(2) == ["1", "2"]
    assert crew.meetings() == 0


def test_a_killed_worker_whose_task_comes_back(crew: DedupWorkers) -> None:
    first, tail = start_two(crew, "late")
    kill(first)
    crew.left()
    assert crew.ran(2) == ["1", "1"]
    assert crew.send("late", 3).id == tail.id
    crew.open(3)
    assert tail.get(timeout=40) == [1, 2]
    assert crew.ran(3) == ["1", "1", "2"]
    assert crew.meetings() == 0


def test_a_killed_pool_process(crew: DedupWorkers) -> None:
    crew.worker().wait_ready()
    _, tail = begin(crew, "early")
    crew.left()
    os.kill(int(crew.runs()[0][1]), signal.SIGKILL)
    # One opening is for the dead worker, whose connection the server may not have dropped yet.
    crew.open(2)
    assert tail.get(timeout=40) == [1, 2]
    assert crew.meetings() == 0


def test_the_timeout_is_a_time_limit_where_the_pool_can_end_a_task(crew: DedupWorkers) -> None:
    worker = crew.worker().wait_ready()
    verdicts = crew.app.dq.dedup["cache"].verdicts

    def ended_by_its_limit() -> bool:
        evictions = verdicts().get("evict", 0)
        crew.witness.delete("runs")
        _, tail = begin(crew, "limited")
        worker.wait_for_log("TimeLimitExceeded", 40)
        assert tail.get(timeout=40) == [1, 2]
        return bool(verdicts().get("evict", 0) == evictions)

    # The pool has a tenth of the time to end it before the broker evicts it. One slow moment is tolerated.
    assert any(ended_by_its_limit() for _ in range(3))
