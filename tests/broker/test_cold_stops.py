"""A cold stop gives back what runs, also in pools where Celery takes it for over."""

from __future__ import annotations

import signal

import pytest

from celery_dq.testing.waiting import wait_until
from tests.broker.yard import Yard


# Celery's soft shutdown sleeps in the signal handler, which the loop of a green pool may refuse.
@pytest.mark.parametrize(
    ("pool", "soft_s"), [("solo", 0.0), ("solo", 0.3), ("gevent", 0.0), ("eventlet", 0.0)]
)
def test_what_a_cold_stop_cancels_comes_back(yard: Yard, pool: str, soft_s: float) -> None:
    yard.conf["worker_soft_shutdown_timeout"] = soft_s
    with yard.worker(pool, 2) as worker:
        result = yard.send("hold_late", "a")
        yard.ran(1, 30, "began")
        # When it is stopped in the midst of a task that is acknowledged late
        assert worker.process is not None
        worker.process.send_signal(signal.SIGQUIT)
        worker.wait(30)
    # Then the task has neither ended nor failed, and the next worker runs it again.
    assert yard.witness.told("ended") == []
    assert not result.ready()
    with yard.worker("threads", 1):
        yard.ran(2, 30, "began")
        yard.witness.release("a")
        assert result.get(timeout=30) == "a"
        yard.settled()
    assert yard.dead() == {}


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_terminated_task_of_a_green_pool_does_not_come_back(yard: Yard, pool: str) -> None:
    with yard.worker(pool, 2):
        result = yard.send("hold_late", "a")
        yard.ran(1, 30, "began")
        yard.is_heard()
        yard.app.control.terminate(result.id)
        wait_until(result.ready, 30)
        yard.settled()
        yard.send("note", "next")
        yard.ran(1, 30)
    assert yard.witness.told("began") == ["a"]
    assert result.state == "REVOKED"
