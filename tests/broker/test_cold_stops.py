"""A cold stop releases running tasks, also in pools where Celery takes them for finished."""

from __future__ import annotations

import signal

import pytest

from celery_dq.testing.waiting import wait_until
from tests.broker.worker_app import WorkerApp


# Celery's signal handler talks to the result backend, which the hub of a green pool refuses: gevent by an
# exception of its own, eventlet (seen with Celery 5.5) by a RuntimeError that ends the worker at once.
@pytest.mark.logged_error("BlockingSwitchOutError", "do not call blocking functions from the mainloop")
# Celery's soft shutdown sleeps in the signal handler, which the hub of a green pool may refuse.
@pytest.mark.parametrize(
    ("pool", "soft_s"),
    [("solo", 0.0), ("solo", 0.3), ("gevent", 0.0), ("eventlet", 0.0), ("prefork", 0.0)],
)
def test_a_task_that_a_cold_stop_cancels_comes_back(worker_app: WorkerApp, pool: str, soft_s: float) -> None:
    worker_app.conf["worker_soft_shutdown_timeout"] = soft_s
    worker_app.conf["dq_max_deliveries"] = 1  # the cancelled task has killed no worker
    worker_app.conf["dq_dead_letter_failures"] = True  # nor has it failed
    with worker_app.worker(pool, 2) as worker:
        result = worker_app.send("hold_late", "a")
        worker_app.ran(1, 30, "began")
        # When the worker is stopped during a task with acks_late
        assert worker.process is not None
        worker.process.send_signal(signal.SIGQUIT)
        worker.wait(30)
    # Then the task has neither ended nor failed, and the next worker runs it again.
    assert worker_app.witness.reports("ended") == []
    assert not result.ready()
    with worker_app.worker("threads", 1):
        worker_app.ran(2, 30, "began")
        worker_app.witness.release("a")
        assert result.get(timeout=30) == "a"
        worker_app.settled()
    assert worker_app.dead() == {}


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_terminated_task_of_a_green_pool_does_not_come_back(worker_app: WorkerApp, pool: str) -> None:
    with worker_app.worker(pool, 2):
        result = worker_app.send("hold_late", "a")
        worker_app.ran(1, 30, "began")
        worker_app.wait_responsive()
        worker_app.app.control.terminate(result.id)
        wait_until(result.ready, 30)
        worker_app.settled()
        worker_app.send("note", "next")
        worker_app.ran(1, 30)
    assert worker_app.witness.reports("began") == ["a"]
    assert result.state == "REVOKED"
