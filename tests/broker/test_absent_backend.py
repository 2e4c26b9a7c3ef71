"""Workers whose result backend does not answer when a task ends."""

from __future__ import annotations

import time
from typing import Any

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.worker_app import OpenApp, WorkerApp

#: No server listens there, and the backend does not try again.
AWAY = {
    "result_backend": "redis://127.0.0.1:1/0",
    "result_backend_transport_options": {"retry_policy": {"max_retries": 0}},
}


@pytest.mark.logged_error("could not be recorded", "Pool callback raised exception", "Hard time limit")
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_a_task_whose_result_cannot_be_stored_is_over(worker_app: WorkerApp, pool: str) -> None:
    app: Any = worker_app.app
    worker_app.conf.update(AWAY)
    app.dq.quotas.set(worker_app.queue, "7", concurrency=1)
    with worker_app.worker(pool, 1) as worker:
        for number in range(2):
            for task in ("note", "note_late"):
                worker_app.send(task, f"{task} {number}", tenant="7")
        # The end of each task frees the slots of the tenant and of the pool.
        assert sorted(worker_app.ran(4)) == ["note 0", "note 1", "note_late 0", "note_late 1"]
        worker_app.settled()
        assert worker_app.witness.reports("ran")[4:] == []
        if pool in ("prefork", "gevent"):  # the others have no hard limits
            worker_app.send("hold_then_call_late", "limited", tenant="7", time_limit=0.2)
            worker_app.ran(1, subject="began")
            worker_app.settled()
            assert worker_app.witness.reports("began") == ["limited"]
        assert "Connection to broker lost" not in worker.log


@pytest.mark.logged_error("could not be recorded")
def test_revoked_and_expired_messages_are_over(worker_app: WorkerApp) -> None:
    app: Any = worker_app.app
    worker_app.conf.update(AWAY)
    with worker_app.worker("threads", 1) as worker:
        worker_app.send("hold", "first")
        worker_app.ran(1, subject="began")
        expired = worker_app.send("note_late", "expired", expires=0.1)
        revoked = worker_app.send("note_late", "revoked")
        assert app.control.revoke(revoked.id, reply=True, limit=1, timeout=20)
        over = time.time() + 0.2
        wait_until(lambda: time.time() > over)
        worker_app.witness.release("first")
        worker_app.send("note_late", "last")
        assert worker_app.ran(1) == ["last"]
        worker_app.settled()
        for each in (expired, revoked):
            assert worker.log.count(f"{each.id}] (revoked) could not be recorded") == 1
        assert "Connection to broker lost" not in worker.log


@pytest.mark.logged_error("could not be recorded", "Cannot connect to")
def test_a_late_task_that_is_cancelled_when_broker_and_backend_are_away_runs_again(
    open_app: OpenApp, server: RedisServer
) -> None:
    worker_app = open_app(
        port=server.port,
        result_backend=f"redis://127.0.0.1:{server.port}/2",
        result_backend_transport_options=AWAY["result_backend_transport_options"],
        worker_cancel_long_running_tasks_on_connection_loss=True,
        task_reject_on_worker_lost=False,
    )
    with worker_app.worker("prefork", 1) as worker:
        worker_app.send("hold_then_call_late", "key")
        worker_app.ran(1, subject="began")
        server.kill()
        worker.wait_for_log("(cancelled) could not be recorded")
        server.start()
        worker_app.ran(2, subject="began")
        worker_app.witness.release("key")
        assert worker_app.ran(1) == ["key"]
