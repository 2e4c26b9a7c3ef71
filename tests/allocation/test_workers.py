"""Real workers that share the partitions of a queue."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from celery_dq.testing.waiting import wait_until
from tests.allocation.shared_queue import QUEUE, SESSION_S, SharedQueue, tenants

TENANTS = tenants(8, 2)
POOLS = ("solo", "threads", "prefork", "gevent")


def test_two_workers_share_a_queue_and_one_is_killed(shared_queue: SharedQueue) -> None:
    with shared_queue.worker("threads", 2) as first:
        assert shared_queue.wait_assigned(first.name) == {first.name: list(range(8))}
        shared_queue.wait_leased_once()
        with shared_queue.worker("threads", 2) as second:
            assigned = shared_queue.wait_assigned(first.name, second.name)
            assert max(map(len, assigned.values())) <= 5
            shared_queue.wait_leased_once()
            for tenant in TENANTS:
                shared_queue.send("note", tenant, tenant=tenant)
            shared_queue.ran(16)
            wait_until(lambda: shared_queue.stored() == 0)
            second.stop(signal.SIGKILL)
            for tenant in TENANTS:
                shared_queue.send("note", tenant, tenant=tenant)
            shared_queue.ran(32)
            shared_queue.wait_assigned(first.name)
        wait_until(lambda: shared_queue.stored() == 0)
    assert Counter(shared_queue.witness.reports("ran")) == Counter(TENANTS * 2)


def partitions_of(control: Any, worker: str) -> Any:
    """Ask a worker for the partitions that it serves; None where kombu took a late answer for its own."""
    answers = control.inspect([worker], timeout=20)._request("allocation") or {}
    return answers.get(worker, {}).get("partitions")


def test_workers_of_each_pool_follow_the_allocation_and_drain(shared_queue: SharedQueue) -> None:
    control: Any = shared_queue.app.control
    with ExitStack() as stack:
        workers = [shared_queue.worker(pool, 2, warm=pool == "threads") for pool in POOLS]
        for worker in workers:
            worker.start()
            stack.push(worker.__exit__)
        for worker in workers:
            worker.wait_ready()
        names = [worker.name for worker in workers]
        assigned = shared_queue.wait_assigned(*names)
        assert max(map(len, assigned.values())) <= 3
        shared_queue.wait_leased_once()
        for tenant in TENANTS:
            shared_queue.send("note", tenant, tenant=tenant)
        shared_queue.ran(16)
        # One after the other: the partitions of each of them go, and others come to it before.
        for number, worker in enumerate(workers[:3]):
            shared_queue.wait_responsive()
            words = {"arguments": {"worker": worker.name}, "destination": [worker.name]}
            # A late answer to the question before counts as the answer for kombu, which returns none then.
            answers = wait_until(partial(control.broadcast, "drain", reply=True, timeout=20, **words))
            assert answers == [{worker.name: {"ok": "this worker gives its partitions away"}}]
            shared_queue.wait_assigned(*names[number + 1 :])
            shared_queue.wait_leased_once()
        others = names[:3]
        for asked, answer in {
            names[3]: {"ok": f"{names[3]} is asked to drain, and this worker goes on"},
            "nosuch": {
                "error": f"no worker 'nosuch' shares partitions; these do: {', '.join(sorted(names))}"
            },
        }.items():
            found = control.broadcast(
                "drain", {"worker": asked}, destination=others, reply=True, timeout=20, limit=len(others)
            )
            assert sorted(map(str, found)) == [str({name: answer}) for name in others]
        # A worker waits a moment before it serves partitions that others have just given away.
        wait_until(lambda: partitions_of(control, names[3]) == {QUEUE: list(range(8))})
        for tenant in TENANTS:
            shared_queue.send("note", tenant, tenant=tenant)
        shared_queue.ran(32)
        wait_until(lambda: shared_queue.stored() == 0)
        # A stopping worker leaves at once; its session lasts longer.
        workers[1].stop()
        wait_until(lambda: len(shared_queue.members.read()) == 3, SESSION_S)
    assert Counter(shared_queue.witness.reports("ran")) == Counter(TENANTS * 2)


def test_a_pinned_partition_stays_with_its_worker(shared_queue: SharedQueue) -> None:
    pinned, other = f"{QUEUE}/3", tenants(8)[2]
    with shared_queue.worker("threads", 2, queues=(pinned, "mail")):
        shared_queue.send("note", other, tenant=other)
        shared_queue.send("note", "pinned", tenant=tenants(8)[3])
        shared_queue.send("note", "mail", queue="mail")
        assert set(shared_queue.ran(2)) == {"pinned", "mail"}
        assert shared_queue.leases() == [0, 0, 0, 1, 0, 0, 0, 0]
        wait_until(lambda: shared_queue.stored() == 1)
        assert shared_queue.generation.number == 0


@pytest.mark.parametrize("how", ["remote", "soft"])
def test_a_worker_that_stops_without_a_signals_flag_leaves_while_its_task_runs(
    shared_queue: SharedQueue, how: str
) -> None:
    # A worker that its broker does not answer leaves after the most part of a lease.
    shared_queue.conf.update(dq_lease=60, worker_soft_shutdown_timeout=30.0)
    with shared_queue.worker("prefork", 2) as first:
        shared_queue.send("hold", "a")
        shared_queue.ran(1, subject="began")
        with shared_queue.worker("threads", 2) as second:
            shared_queue.wait_assigned(first.name, second.name)
            if how == "remote":
                shared_queue.app.control.shutdown(destination=[first.name])
            else:
                os.kill(first.pid, signal.SIGQUIT)
            shared_queue.wait_assigned(second.name, timeout_s=20)
            for tenant in TENANTS:
                shared_queue.send("note", tenant, tenant=tenant)
            shared_queue.ran(16, 20)
            assert first.alive
            first.stop(signal.SIGKILL)
