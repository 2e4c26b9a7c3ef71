"""Real workers that share the partitions of a queue."""

from __future__ import annotations

import signal
from collections import Counter

from celery_dq.testing.waiting import wait_until
from tests.allocation.shared_queue import SharedQueue, tenants

TENANTS = tenants(8, 2)


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
            second.stop(signal.SIGKILL)
            for tenant in TENANTS:
                shared_queue.send("note", tenant, tenant=tenant)
            shared_queue.ran(32)
            shared_queue.wait_assigned(first.name)
        wait_until(lambda: shared_queue.stored() == 0)
    assert Counter(shared_queue.witness.reports("ran")) == Counter(TENANTS * 2)
