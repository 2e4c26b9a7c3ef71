"""What only a pool of processes can do: limits, termination, the loss of a child."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from uuid import uuid4

import psutil
import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError

from celery_dq.testing.waiting import wait_until
from tests.conformance.workplace import Workplace

WAIT = 30


@pytest.fixture(scope="module", params=["prefork"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def the_worker_goes_on(staffed: Workplace) -> Iterator[None]:
    yield
    assert staffed.send("add", 1, 1).get(timeout=WAIT) == 2


def test_soft_time_limit(staffed: Workplace) -> None:
    assert staffed.send("patient", uuid4().hex).get(timeout=WAIT) == "soft limit"


def test_hard_time_limit(staffed: Workplace) -> None:
    with pytest.raises(TimeLimitExceeded):
        staffed.send("stubborn", uuid4().hex).get(timeout=WAIT)


def test_terminating_a_running_task(staffed: Workplace) -> None:
    key = uuid4().hex
    result = staffed.send("hold", key)
    child = int(staffed.witness.wait(f"started:{key}"))
    result.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    wait_until(lambda: not psutil.pid_exists(child), WAIT)
    assert staffed.witness.told(f"finished:{key}") == []


def test_terminating_a_late_acked_task_does_not_bring_it_back(staffed: Workplace) -> None:
    key = uuid4().hex
    result = staffed.send("hold_late", key)
    staffed.witness.wait(f"started:{key}")
    result.revoke(terminate=True, signal="SIGKILL")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    assert staffed.send("add", 2, 2).get(timeout=WAIT) == 4
    assert staffed.witness.told(f"started:{key}") == []


def test_a_lost_child_fails_an_early_acked_task(staffed: Workplace) -> None:
    key = uuid4().hex
    result = staffed.send("hold", key)
    os.kill(int(staffed.witness.wait(f"started:{key}")), signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        result.get(timeout=WAIT)


def test_reject_on_worker_lost_runs_it_again(staffed: Workplace) -> None:
    key = uuid4().hex
    result = staffed.send("hold_or_die", key)
    os.kill(int(staffed.witness.wait(f"started:{key}")), signal.SIGKILL)
    staffed.witness.wait(f"started:{key}")
    staffed.witness.release(key)
    assert result.get(timeout=WAIT) == key


def test_a_task_that_kills_its_child_once(staffed: Workplace) -> None:
    key = uuid4().hex
    assert staffed.send("die_once", key).get(timeout=WAIT) == "survived"
    counted = "1" if staffed.broker.has_leases else "None"
    assert staffed.witness.told(f"deliveries:{key}") == ["None", counted]
