"""Workers whose result backend does not answer when a task ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.worker_app import WorkerApp


@pytest.mark.logged_error("could not be recorded", "Pool callback raised exception")
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_a_task_whose_result_cannot_be_stored_is_over(worker_app: WorkerApp, pool: str) -> None:
    app: Any = worker_app.app
    worker_app.conf["result_backend"] = "redis://127.0.0.1:1/0"  # no server listens there
    worker_app.conf["result_backend_transport_options"] = {"retry_policy": {"max_retries": 0}}
    app.dq.quotas.set(worker_app.queue, "7", concurrency=1)
    with worker_app.worker(pool, 1) as worker:
        for number in range(2):
            for task in ("note", "note_late"):
                worker_app.send(task, f"{task} {number}", tenant="7")
        # The end of each task frees the slots of the tenant and of the pool.
        assert sorted(worker_app.ran(4)) == ["note 0", "note 1", "note_late 0", "note_late 1"]
        worker_app.settled()
        assert worker_app.witness.reports("ran")[4:] == []
        assert "Connection to broker lost" not in worker.log
