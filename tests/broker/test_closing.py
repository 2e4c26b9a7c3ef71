"""A worker that shuts down: how it notices, and how its running tasks end."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from celery import bootsteps
from celery.worker import state

from celery_dq.compat.prefork_pool import terminates
from celery_dq.testing.waiting import wait_until
from celery_dq.worker.lifecycle import PoolCapacity
from tests.broker.worker_app import OpenApp, WorkerApp

_STEPS: Any = bootsteps  # its types lack the names
RUN, CLOSE = _STEPS.RUN, _STEPS.CLOSE


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
    assert capacity_of(RUN).closing is closing
    assert terminates() is (closing and flag == "should_terminate")


@pytest.mark.parametrize(
    ("blueprint", "stops_softly", "closing"),
    [(None, False, False), (RUN, False, False), (CLOSE, False, True), (RUN, True, True)],
)
def test_a_worker_is_closing_also_without_a_flag_of_celery(
    blueprint: Any, stops_softly: bool, closing: bool
) -> None:
    assert capacity_of(blueprint, stops_softly).closing is closing


def capacity_of(blueprint: Any, stops_softly: bool = False) -> PoolCapacity:
    """Return the capacity of a worker in this state; a whole one would change the state of this process."""
    controller = SimpleNamespace(blueprint=SimpleNamespace(state=blueprint), dq_stops_softly=stops_softly)
    capacity = object.__new__(PoolCapacity)
    capacity._consumer = SimpleNamespace(controller=controller)
    return capacity


def test_a_soft_shutdown_leaves_new_messages_to_other_workers(open_app: OpenApp) -> None:
    # A message that the stopping worker claims would wait for twice the time of dq_claim_ahead.
    worker_app = open_app(dq_lease=60, dq_claim_ahead=10, worker_soft_shutdown_timeout=60.0)
    with worker_app.worker("prefork", 4) as worker:
        worker_app.send("hold", "a")
        worker_app.ran(1, subject="began")
        with worker_app.worker("prefork", 4):
            assert worker.process is not None
            worker.process.send_signal(signal.SIGQUIT)
            worker.wait_for_log("Initiating Soft Shutdown")
            for number in range(12):
                worker_app.send("note", number)
                worker_app.ran(number + 1, 15)
            assert worker.alive
            worker.stop(signal.SIGKILL)


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
