"""A worker acknowledges and releases messages while its event loop is blocked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.worker_app import WorkerApp

#: No heartbeat comes within a test, and messages claimed ahead are released long before its deadlines.
LEASE_S, DEADLINE_S = 60.0, 5.0


@pytest.fixture
def blocked_app(redis_server: RedisServer) -> Iterator[WorkerApp]:
    """An app with a long lease."""
    worker_app = WorkerApp(redis_server, redis_server.port, dq_lease=LEASE_S)
    yield worker_app
    worker_app.close()


def test_an_early_ack_reaches_the_broker_while_its_task_blocks_the_solo_pool(blocked_app: WorkerApp) -> None:
    app: Any = blocked_app.app
    with blocked_app.worker("solo", 1):
        task = blocked_app.send("hold", "long")
        blocked_app.ran(1, subject="began")
        wait_until(lambda: "is not delivered again" in str(app.dq.explain(task_id=task.id)), DEADLINE_S)
        blocked_app.witness.release("long")
        blocked_app.settled()


def test_a_message_behind_a_blocked_solo_pool_goes_to_another_worker(blocked_app: WorkerApp) -> None:
    with blocked_app.worker("solo", 1):
        blocked_app.send("note", "short")
        blocked_app.ran(1)
        blocked_app.send("hold", "long")
        blocked_app.ran(1, subject="began")
        blocked_app.send("note", "behind")
        with blocked_app.worker("threads", 1, warm=True):
            wait_until(lambda: "behind" in blocked_app.witness.reports("ran"), DEADLINE_S)
        blocked_app.witness.release("long")
        blocked_app.settled()
