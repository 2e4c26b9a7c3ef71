"""Real workers on tasks that any of several resources can do."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

from celery_dq import AnyOf
from celery_dq.testing.waiting import wait_until
from tests.broker.worker_app import WorkerApp

ALL = AnyOf("gpu-1", "gpu-2", "slow")


def of_resources(reports: list[str]) -> Counter[str]:
    """Count reports of the task `use` by resource."""
    return Counter(each.split()[1] for each in reports)


def of_keys(reports: list[str]) -> Counter[str]:
    return Counter(each.split()[0] for each in reports)


def quotas_of(worker_app: WorkerApp) -> Any:
    app: Any = worker_app.app
    return app.dq.quotas


def limit(worker_app: WorkerApp, **concurrency: int) -> None:
    quotas = quotas_of(worker_app)
    for resource, most in concurrency.items():
        quotas.set(worker_app.queue, resource.replace("_", "-"), concurrency=most)


def test_all_resources_are_busy_and_none_waits_for_a_slow_one(worker_app: WorkerApp) -> None:
    limit(worker_app, gpu_1=2, gpu_2=3, slow=1)
    for number in range(30):
        worker_app.send("use", f"k{number}", tenant=ALL)
    with worker_app.worker("threads", 10):
        assert of_resources(worker_app.ran(6, subject="took")) == {"gpu-1": 2, "gpu-2": 3, "slow": 1}
        # A capacity changes while the resource is busy.
        limit(worker_app, gpu_1=4)
        assert of_resources(worker_app.ran(8, subject="took"))["gpu-1"] == 4
        limit(worker_app, gpu_1=1)
        worker_app.witness.release("gpu-2", 3)
        assert of_resources(worker_app.ran(11, subject="took")) == {"gpu-1": 4, "gpu-2": 6, "slow": 1}
        worker_app.witness.release("gpu-1", 30)
        worker_app.witness.release("gpu-2", 30)
        left = of_resources(worker_app.ran(29, subject="left"))
        assert "slow" not in left
        assert left["gpu-1"] >= 4
        worker_app.witness.release("slow")
        worker_app.settled()
    assert set(of_keys(worker_app.witness.reports("left")).values()) == {1}
    assert len(worker_app.witness.reports("left")) == len(worker_app.witness.reports("took")) == 30


def test_nothing_is_lost_with_a_killed_worker(worker_app: WorkerApp) -> None:
    limit(worker_app, gpu_1=2, gpu_2=3, slow=1)
    for number in range(20):
        worker_app.send("use", f"k{number}", tenant=ALL)
    with worker_app.worker("threads", 10) as victim:
        worker_app.ran(6, subject="took")
        victim.stop(signal.SIGKILL)
    # A dead task whose connection Redis has not closed yet would take a release.
    wait_until(lambda: not [each for each in worker_app.client.client_list() if "b" in each["flags"]])
    for each in ("gpu-1", "gpu-2", "slow"):
        worker_app.witness.release(each, 30)
    with worker_app.worker("threads", 10):
        worker_app.settled()
    assert of_keys(worker_app.witness.reports("left")) == {f"k{number}": 1 for number in range(20)}


def test_a_retry_keeps_the_set_and_not_the_choice(worker_app: WorkerApp) -> None:
    quotas = quotas_of(worker_app)
    quotas.pause(worker_app.queue, "gpu-2")
    # A name that the publisher has put there means nothing.
    worker_app.send("use", "k", True, tenant=AnyOf("gpu-1", "gpu-2"), headers={"dq_resource": "forged"})
    with worker_app.worker("prefork", 2):
        worker_app.ran(1, subject="took")
        quotas.pause(worker_app.queue, "gpu-1")
        quotas.resume(worker_app.queue, "gpu-2")
        worker_app.witness.release("gpu-1")
        worker_app.witness.release("gpu-2")
        worker_app.ran(1, subject="left")
        # The task finds its resource in the same place when the caller names it.
        worker_app.send("use", "l", tenant="gpu-2")
        worker_app.witness.release("gpu-2")
        worker_app.ran(2, subject="left")
    assert worker_app.witness.reports("took") == ["k gpu-1", "k gpu-2", "l gpu-2"]
