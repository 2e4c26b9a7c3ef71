"""``dq_dead_letter_failures`` keeps the tasks that have failed for good, as Celery decides, and no others."""

from __future__ import annotations

import pytest
from celery import Task
from celery.worker.request import Request

from celery_dq.testing.waiting import wait_until
from tests.broker.worker_app import OpenApp, WorkerApp
from tests.workers import WorkerProcess


@pytest.fixture
def keeping(open_app: OpenApp) -> WorkerApp:
    return open_app(dq_dead_letter_failures=True, task_reject_on_worker_lost=False)


def wait_kept(app: WorkerApp, reason: bytes) -> None:
    """Wait until the only message of the queue is a dead letter with this reason."""
    wait_until(app.dead, 30, what="a dead letter")
    assert [reason in info for info in app.dead().values()] == [True]


def kill_child(app: WorkerApp, worker: WorkerProcess, began: int) -> None:
    """Kill the child of a worker during its task, which is the `began`-th one."""
    app.ran(began, subject="began")
    for child in worker.children():
        child.kill()


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_task_whose_time_limit_ends_it_is_kept_unless_it_runs_again(keeping: WorkerApp, pool: str) -> None:
    keeping.conf["task_acks_on_failure_or_timeout"] = False
    with keeping.worker(pool, 2):
        keeping.send("hold_late", "again", time_limit=1)
        keeping.ran(2, subject="began")
        assert keeping.dead() == {}
        keeping.send("hold", "never again", time_limit=1)
        wait_kept(keeping, b"failed: TimeLimitExceeded")


@pytest.mark.parametrize("task", ["hold_then_call", "hold_then_call_late"])
def test_a_task_whose_child_dies_is_kept(keeping: WorkerApp, task: str) -> None:
    with keeping.worker("prefork", 1) as worker:
        keeping.send(task, "a")
        kill_child(keeping, worker, 1)
        wait_kept(keeping, b"failed: WorkerLostError")
        keeping.settled()


@pytest.mark.parametrize("task", ["hold_late", "hold_again"])
def test_a_task_whose_child_dies_and_that_runs_again_is_not_kept(keeping: WorkerApp, task: str) -> None:
    if task == "hold_again" and not hasattr(Task, "retry_on_worker_lost"):
        pytest.skip("Celery retries lost tasks since 5.7")
    with keeping.worker("prefork", 1) as worker:
        keeping.send(task, "a")
        kill_child(keeping, worker, 1)
        keeping.ran(2, subject="began")
        assert keeping.dead() == {}
        if task == "hold_again":
            # That was its last retry.
            kill_child(keeping, worker, 2)
            wait_kept(keeping, b"failed: WorkerLostError")


@pytest.mark.skipif(
    not hasattr(Request, "_success_was_stored"), reason="before Celery 5.7, such a task has failed"
)
def test_a_task_whose_child_dies_after_its_success_is_not_kept(keeping: WorkerApp) -> None:
    with keeping.worker("prefork", 1) as worker:
        result = keeping.send("succeed_and_die")
        worker.wait_for_log("succeeded before the worker was lost")
        keeping.settled()
    assert result.state == "SUCCESS"
    assert keeping.dead() == {}


def test_a_task_that_is_revoked_while_it_runs_is_not_kept(keeping: WorkerApp) -> None:
    with keeping.worker("prefork", 1):
        result = keeping.send("hold", "a")
        keeping.ran(1, subject="began")
        keeping.wait_responsive()
        keeping.app.control.terminate(result.id)
        keeping.settled()
    assert result.state == "REVOKED"
    assert keeping.dead() == {}
