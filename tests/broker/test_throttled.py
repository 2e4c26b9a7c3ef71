"""A task that raises ``Throttled`` on real workers."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import pytest
from celery.result import AsyncResult

from celery_dq.testing.waiting import wait_until
from tests.broker.worker_app import WorkerApp

POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]
#: Seconds of a pause that does not end while a test runs.
LONG_S = 3600


def dq_of(worker_app: WorkerApp) -> Any:
    app: Any = worker_app.app
    return app.dq


def paused(worker_app: WorkerApp) -> Any:
    return dq_of(worker_app).quotas.paused(worker_app.queue)


def wait_for_pause(worker_app: WorkerApp, tenant: str) -> Any:
    wait_until(lambda: tenant in paused(worker_app), 30, what=lambda: f"{tenant} is paused")
    return paused(worker_app)[tenant]


def asked(worker_app: WorkerApp, key: str) -> list[tuple[float, int, bool]]:
    """Return the time, the counted retries, and whether it was redelivered, of each attempt of a task."""
    reports = (each.split() for each in worker_app.witness.reports(f"asked {key}"))
    return [(float(at), int(retries), redelivered == "True") for at, retries, redelivered in reports]


@pytest.mark.parametrize("task", ["ask", "ask_late", "ask_again"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_throttled_task_runs_again_before_the_later_ones(
    worker_app: WorkerApp, pool: str, task: str
) -> None:
    dq_of(worker_app).quotas.set(worker_app.queue, "a", concurrency=1)
    results = [worker_app.send(task, f"k{number}", 0.3, 2 - 2 * number, tenant="a") for number in range(2)]
    with worker_app.worker(pool, 1 if pool == "solo" else 2):
        assert worker_app.ran(2, subject="served") == ["k0", "k1"]
        worker_app.settled()
    first, second, third = asked(worker_app, "k0")
    assert first[1:] == second[1:] == third[1:] == (0, False)
    assert min(second[0] - first[0], third[0] - second[0]) >= 0.3
    assert [each.get(timeout=10) for each in results] == ["k0", "k1"]
    assert worker_app.witness.reports("retried") == ["None"] * 2
    assert worker_app.witness.reports("failed") == []
    assert paused(worker_app) == {}


@pytest.mark.parametrize("task", ["ask", "ask_late"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_throttled_task_waits_in_the_broker(worker_app: WorkerApp, pool: str, task: str) -> None:
    result: AsyncResult[str] = worker_app.send(task, "k", LONG_S, tenant="a")
    with worker_app.worker(pool) as worker:
        pause = wait_for_pause(worker_app, "a")
        wait_until(lambda: result.state == "RETRY", 30)
        worker_app.send("note", "of another tenant", tenant="b")
        worker_app.ran(1)
        worker.stop(signal.SIGKILL)
    assert (pause.cause.reason, pause.cause.task, pause.cause.task_id) == ("429 for k", task, result.id)
    assert timedelta(seconds=LONG_S - 60) < pause.until - pause.since <= timedelta(seconds=LONG_S)
    (message,) = dq_of(worker_app).queues[worker_app.queue].peek()
    assert (message.id, message.state, message.deliveries) == (result.id, "waiting", 0)
    with worker_app.worker(pool):
        worker_app.send("note", "of another tenant again", tenant="b")
        worker_app.ran(2)
        assert len(asked(worker_app, "k")) == 1
        dq_of(worker_app).quotas.resume(worker_app.queue, "a")
        assert worker_app.ran(1, subject="served") == ["k"]
        worker_app.settled()
