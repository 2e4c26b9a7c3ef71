"""A worker that shuts down: how it notices, and how its running tasks end."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from celery.worker import state

from celery_dq.compat.prefork_pool import terminates
from celery_dq.testing.waiting import wait_until
from celery_dq.worker.lifecycle import PoolCapacity
from tests.broker.worker_app import WorkerApp


@pytest.mark.parametrize(
    ("flag", "value", "closing"),
    [
        ("should_stop", None, False),
        ("should_stop", False, False),
        # Celery's handler of SIGTERM sets the exit code
        ("should_stop", 0, True),
        ("should_stop", True, True),
        ("should_terminate", 0, True),
    ],
)
def test_a_worker_is_closing_for_every_stop_flag_of_celery(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: Any, closing: bool
) -> None:
    monkeypatch.setattr(state, flag, value)
    # The property reads Celery's flags only; a whole worker would change the state of this process.
    assert object.__new__(PoolCapacity).closing is closing
    assert terminates() is (closing and flag == "should_terminate")


def test_a_message_written_in_part_to_a_child_is_completed_in_a_warm_shutdown(worker_app: WorkerApp) -> None:
    # Given a child that does not read, and a message larger than the buffer of its pipe
    with worker_app.worker("prefork", 1, warm=True) as worker:
        worker_app.send("note", "first")
        worker_app.ran(1)
        # The child has reported the end of the first task, so the worker takes it for free.
        worker_app.settled()
        (child,) = worker.children()
        child.suspend()
        result = worker_app.send("note", "x" * 300_000)
        worker.wait_for_log(result.id)
        # After its answer, the worker has turned its loop and filled the pipe.
        worker_app.wait_responsive()
        # When the worker is stopped
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
        child.resume()
        assert worker.wait(60) == 0
    # Then the task has run, and is over.
    assert len(worker_app.ran(2)[1]) == 300_000
    worker_app.settled()


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_a_task_may_wait_on_its_own_connection_while_its_worker_stops(
    worker_app: WorkerApp, pool: str
) -> None:
    with worker_app.worker(pool, 1, warm=True) as worker:
        worker_app.send("listen", "a", 1.0)
        worker_app.ran(1, 30, "began")
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Warm shutdown" in worker.log, 30)
        worker_app.witness.release("a")
        worker.wait(30)
    (listened,) = worker_app.witness.reports("listened")
    # A shorter wait would lose answers, for example those of remote control.
    assert float(listened) > 0.9
