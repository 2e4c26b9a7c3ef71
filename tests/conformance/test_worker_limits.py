"""The features of a pool of processes: limits, termination, the loss of a child."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from uuid import uuid4

import psutil
import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError
from celery.worker.request import Request

from celery_dq.testing.waiting import wait_until
from tests.conformance.celery_app import CeleryApp

WAIT = 30

#: This Celery calls ``Task.on_failure`` after a hard time limit; older versions record the failure only.
CALLS_ON_FAILURE = "on_failure" in Request.on_timeout.__code__.co_names


@pytest.fixture(scope="module", params=["prefork"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def the_worker_goes_on(staffed_app: CeleryApp) -> Iterator[None]:
    yield
    assert staffed_app.send("add", 1, 1).get(timeout=WAIT) == 2


def test_soft_time_limit(staffed_app: CeleryApp) -> None:
    assert staffed_app.send("patient", uuid4().hex).get(timeout=WAIT) == "soft limit"


@pytest.mark.parametrize("task", ["stubborn", "stubborn_late"])
def test_hard_time_limit(staffed_app: CeleryApp, task: str) -> None:
    worker = staffed_app.shared_worker
    assert worker is not None
    result = staffed_app.send(task, uuid4().hex, link_error=staffed_app.signature("note_failure"))
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=WAIT)
    worker.wait_for_log(f"Hard time limit (1s) exceeded for {task}[{result.id}]", WAIT)
    if CALLS_ON_FAILURE:
        assert staffed_app.witness.wait(f"failed:{result.id}") == "TimeLimitExceeded"
    staffed_app.witness.wait(f"errback:{result.id}")
    assert "Pool callback raised" not in worker.log


def test_terminating_a_running_task(staffed_app: CeleryApp) -> None:
    key = uuid4().hex
    result = staffed_app.send("hold", key)
    child = int(staffed_app.witness.wait(f"started:{key}"))
    result.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    wait_until(lambda: not psutil.pid_exists(child), WAIT)
    assert staffed_app.witness.reports(f"finished:{key}") == []


def test_terminating_a_late_acked_task_does_not_bring_it_back(staffed_app: CeleryApp) -> None:
    key = uuid4().hex
    result = staffed_app.send("hold_late", key)
    staffed_app.witness.wait(f"started:{key}")
    result.revoke(terminate=True, signal="SIGKILL")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    assert staffed_app.send("add", 2, 2).get(timeout=WAIT) == 4
    assert staffed_app.witness.reports(f"started:{key}") == []


def test_a_lost_child_fails_an_early_acked_task(staffed_app: CeleryApp) -> None:
    key = uuid4().hex
    result = staffed_app.send("hold", key)
    os.kill(int(staffed_app.witness.wait(f"started:{key}")), signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        result.get(timeout=WAIT)


def test_reject_on_worker_lost_runs_it_again(staffed_app: CeleryApp) -> None:
    key = uuid4().hex
    result = staffed_app.send("hold_or_die", key)
    os.kill(int(staffed_app.witness.wait(f"started:{key}")), signal.SIGKILL)
    staffed_app.witness.wait(f"started:{key}")
    staffed_app.witness.release(key)
    assert result.get(timeout=WAIT) == key


def test_a_task_that_kills_its_child_once(staffed_app: CeleryApp) -> None:
    key = uuid4().hex
    assert staffed_app.send("die_once", key).get(timeout=WAIT) == "survived"
    counted = ["0", "1"] if staffed_app.broker.has_leases else ["None", "None"]
    assert staffed_app.witness.reports(f"deliveries:{key}") == counted
