"""Real workers on a queue with several partitions."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import pytest

from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.home import home_of
from tests.broker.worker_app import OpenApp, WorkerApp

QUEUE = "shops"
#: Three tenants of each partition.
TENANTS = [
    tenant
    for home in range(4)
    for tenant in [name for name in (f"shop-{number}" for number in range(60)) if home_of(name, 4) == home][
        :3
    ]
]


@pytest.fixture
def worker_app(open_app: OpenApp) -> WorkerApp:
    return open_app(task_default_queue=QUEUE, dq_queues={QUEUE: {"partitions": 4}})


def stored(worker_app: WorkerApp) -> list[int]:
    keys = [PartitionKeys("online", QUEUE, number) for number in range(4)]
    return [worker_app.client.hlen(each.messages) for each in keys]


def send_one_each(worker_app: WorkerApp, task: str = "note") -> None:
    for tenant in TENANTS:
        worker_app.send(task, tenant, tenant=tenant)


def test_messages_of_a_killed_worker_return_in_every_partition(worker_app: WorkerApp) -> None:
    send_one_each(worker_app, "hold_late")
    assert stored(worker_app) == [3, 3, 3, 3]
    with worker_app.worker("prefork", 4) as victim:
        # The others are prefetched.
        worker_app.ran(4, subject="began")
        # The parent goes first, or it would give the prefetched messages to new children.
        children = victim.children()
        os.kill(victim.pid, signal.SIGKILL)
        for child in children:
            child.kill()
        wait_until(lambda: not victim.alive)
        # A dead child whose connection Redis has not closed yet would take the release of its message.
        wait_until(lambda: not [each for each in worker_app.client.client_list() if "b" in each["flags"]])
    for tenant in TENANTS:
        worker_app.witness.release(tenant)
    with worker_app.worker("threads", 4):
        worker_app.ran(12, subject="ended")
        wait_until(lambda: stored(worker_app) == [0, 0, 0, 0])
    assert len(worker_app.witness.reports("began")) == 16
    assert Counter(worker_app.witness.reports("ended")) == Counter(TENANTS)


def test_a_worker_with_other_settings_and_a_pinned_one_share_the_queue(worker_app: WorkerApp) -> None:
    send_one_each(worker_app)
    others: dict[str, Any] = dict(worker_app.conf)
    with worker_app.worker("threads", 2, queues=(f"{QUEUE}/1",)) as pinned:
        worker_app.ran(3)
        wait_until(lambda: stored(worker_app) == [3, 0, 3, 3])
        assert {home_of(tenant, 4) for tenant in worker_app.witness.reports("ran")} == {1}
        assert pinned.alive
        del others["dq_queues"]
        worker_app.conf = others
        with worker_app.worker("threads", 2) as whole:
            worker_app.ran(12)
            wait_until(lambda: stored(worker_app) == [0, 0, 0, 0])
            # Remote control names the queue as -Q does.
            worker_app.wait_responsive()
            worker_app.app.control.cancel_consumer(QUEUE, destination=[whole.name], reply=True)
            send_one_each(worker_app)
            worker_app.ran(15)
            wait_until(lambda: stored(worker_app) == [3, 0, 3, 3])
            worker_app.app.control.add_consumer(QUEUE, destination=[whole.name], reply=True)
            worker_app.ran(24)
    assert Counter(worker_app.witness.reports("ran")) == Counter(TENANTS * 2)
