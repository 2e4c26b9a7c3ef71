"""Workers that die with a claim in hand: the key goes on, and nobody meets anybody."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from celery_dq.dedup.machine import Verdict
from celery_dq.testing.servers import RedisServer
from tests.dedup.captain import Crew, kill
from tests.workers import WorkerProcess


@pytest.fixture
def crew(redis_url: str, redis_server: RedisServer) -> Iterator[Crew]:
    redis_server.flush(0)
    crew = Crew(redis_url.replace("redis://", "dq-redis://"), redis_url, redis_server.url(0))
    yield crew
    crew.close()
    redis_server.flush(0)


def start_two(crew: Crew, task: str) -> tuple[WorkerProcess, Any]:
    """A worker that runs the head, and the result of the tail behind it."""
    worker = crew.worker().wait_ready()
    crew.send(task, 1)
    crew.ran(1)
    tail = crew.send(task, 2)
    assert tail.verdict is Verdict.BLOCK
    return worker, tail


def test_a_killed_worker_whose_task_was_acknowledged(crew: Crew) -> None:
    first, tail = start_two(crew, "early")
    second = crew.worker("w2").wait_ready()
    try:
        kill(first)
        crew.left()
        crew.open(2)
        assert tail.get(timeout=15) == [1, 2]
        assert crew.ran(2) == ["1", "2"]
        assert crew.meetings() == 0
    finally:
        first.discard()
        second.discard()


def test_a_killed_worker_whose_task_comes_back(crew: Crew) -> None:
    first, tail = start_two(crew, "late")
    second = crew.worker("w2").wait_ready()
    try:
        kill(first)
        crew.left()
        assert crew.ran(2) == ["1", "1"]
        assert crew.send("late", 3).id == tail.id
        crew.open(3)
        assert tail.get(timeout=15) == [1, 2]
        assert crew.ran(3) == ["1", "1", "2"]
        assert crew.meetings() == 0
    finally:
        first.discard()
        second.discard()


def test_a_killed_pool_process(crew: Crew) -> None:
    worker, tail = start_two(crew, "early")
    try:
        crew.left()
        os.kill(int(crew.runs()[0][1]), signal.SIGKILL)
        # One for the dead one, whose connection the server may not have missed yet.
        crew.open(2)
        assert tail.get(timeout=15) == [1, 2]
        assert crew.meetings() == 0
    finally:
        worker.discard()


def test_the_timeout_is_a_time_limit_where_the_pool_can_end_a_task(crew: Crew) -> None:
    worker, tail = start_two(crew, "limited")
    try:
        worker.wait_for_log("TimeLimitExceeded", 15)
        assert tail.get(timeout=15) == [1, 2]
        assert "evict" not in crew.app.dq.dedup["cache"].verdicts()
    finally:
        worker.discard()
