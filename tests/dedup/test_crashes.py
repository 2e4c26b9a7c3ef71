"""Workers that die while they hold a dedup lock: the next call runs, and no two runs overlap."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from celery import Task

from celery_dq.dedup.machine import Verdict
from celery_dq.testing.waiting import wait_until
from tests.dedup.dedup_workers import DedupWorkers, kill
from tests.workers import WorkerProcess


def start_two(dedup_workers: DedupWorkers, task: str) -> tuple[WorkerProcess, Any]:
    """Start two workers; return the one that runs the head, and the result of the tail behind it."""
    for worker in [dedup_workers.worker("w1"), dedup_workers.worker("w2")]:
        worker.wait_ready(60)
    return begin(dedup_workers, task)


def begin(dedup_workers: DedupWorkers, task: str) -> tuple[WorkerProcess, Any]:
    dedup_workers.send(task, 1)
    dedup_workers.ran(1)
    tail = dedup_workers.send(task, 2)
    assert tail.verdict is Verdict.BLOCK
    return dedup_workers.who_runs(), tail


def test_a_killed_worker_whose_task_was_acknowledged(dedup_workers: DedupWorkers) -> None:
    first, tail = start_two(dedup_workers, "early")
    kill(first)
    dedup_workers.left()
    dedup_workers.open(2)
    assert tail.get(timeout=40) == [1, 2]
    assert dedup_workers.ran(2) == ["1", "2"]
    assert dedup_workers.meetings() == 0


def test_a_killed_worker_whose_task_comes_back(dedup_workers: DedupWorkers) -> None:
    first, tail = start_two(dedup_workers, "late")
    kill(first)
    dedup_workers.left()
    assert dedup_workers.ran(2) == ["1", "1"]
    assert dedup_workers.send("late", 3).id == tail.id
    dedup_workers.open(3)
    assert tail.get(timeout=40) == [1, 2]
    assert dedup_workers.ran(3) == ["1", "1", "2"]
    assert dedup_workers.meetings() == 0


def test_a_killed_pool_process(dedup_workers: DedupWorkers) -> None:
    dedup_workers.worker().wait_ready()
    _, tail = begin(dedup_workers, "early")
    dedup_workers.left()
    os.kill(int(dedup_workers.runs()[0][1]), signal.SIGKILL)
    # One opening is for the dead worker, whose connection the server may not have dropped yet.
    dedup_workers.open(2)
    assert tail.get(timeout=40) == [1, 2]
    assert dedup_workers.meetings() == 0


if hasattr(Task, "retry_on_worker_lost"):  # since Celery 5.7

    @pytest.mark.parametrize("dedup_workers", ["dq-redis", "redis"], indirect=True)
    def test_a_killed_pool_process_whose_task_is_retried(dedup_workers: DedupWorkers) -> None:
        dedup_workers.worker().wait_ready()
        dedup_workers.send("retried", 1)
        dedup_workers.ran(1)
        tail = dedup_workers.send("retried", 2)
        verdicts = dedup_workers.app.dq.dedup["cache"].verdicts
        wait_until(lambda: "block" in verdicts(), 30, what="the tail waits")
        dedup_workers.left()
        os.kill(int(dedup_workers.runs()[0][1]), signal.SIGKILL)
        # The retry has the key, and the tail goes on waiting.
        assert dedup_workers.ran(2) == ["1", "1"]
        dedup_workers.open(3)
        assert tail.get(timeout=40) == [1, 2]
        assert dedup_workers.ran(3) == ["1", "1", "2"]
        assert dedup_workers.meetings() == 0


def test_the_timeout_is_a_time_limit_where_the_pool_can_end_a_task(dedup_workers: DedupWorkers) -> None:
    worker = dedup_workers.worker().wait_ready()
    verdicts = dedup_workers.app.dq.dedup["cache"].verdicts

    def ended_by_its_limit() -> bool:
        evictions = verdicts().get("evict", 0)
        dedup_workers.witness.delete("runs")
        _, tail = begin(dedup_workers, "limited")
        worker.wait_for_log("TimeLimitExceeded", 40)
        assert tail.get(timeout=40) == [1, 2]
        return bool(verdicts().get("evict", 0) == evictions)

    # The pool has a tenth of the time to end it before the broker evicts it. One slow moment is tolerated.
    assert any(ended_by_its_limit() for _ in range(3))
