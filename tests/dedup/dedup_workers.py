"""Worker processes of a test: start and kill them, open their barriers, and read which tasks ran."""

from __future__ import annotations

import signal
from typing import Any

import redis

from celery_dq.testing.waiting import wait_until
from tests.dedup.dedup_worker_app import NAME, add_tasks
from tests.workers import WorkerProcess, make_app


class DedupWorkers:
    """The caller's side of the workers of :mod:`tests.dedup.dedup_worker_app`.

    `witness_url` is an empty database in which they record their runs. The lease is the time for which the
    machine may stand still without a worker being taken for dead. A test must remove a dead worker from the
    record in that time.
    """

    def __init__(
        self, broker_url: str, backend_url: str, witness_url: str, queue: str = "cache", lease: float = 5.0
    ) -> None:
        self.conf = {
            "broker_url": broker_url,
            "result_backend": backend_url,
            "witness": witness_url,
            "task_default_queue": queue,
            "dq_lease": lease,
        }
        self.workers: list[WorkerProcess] = []
        self.app: Any = add_tasks(make_app(NAME, None, self.conf))
        # No timeout: a repeated request would open a barrier twice, for two tasks.
        self.witness: Any = redis.Redis.from_url(witness_url, decode_responses=True, socket_timeout=None)

    def worker(self, name: str = "w1", pool: str = "prefork") -> WorkerProcess:
        worker = WorkerProcess(
            "tests.dedup.dedup_worker_app", broker=None, conf=self.conf, pool=pool, name=name, preloaded=True
        )
        self.workers.append(worker)
        return worker.start()

    def who_runs(self) -> WorkerProcess:
        """The worker with the process that began the last run."""
        pid = int(self.runs()[-1][1])
        return next(each for each in self.workers if pid in [child.pid for child in each.children()])

    def dismiss(self) -> None:
        while self.workers:
            self.workers.pop().discard()

    def close(self) -> None:
        self.dismiss()
        self.witness.close()
        self.app.pool.force_close_all()
        self.app.close()

    def send(self, task: str, version: int, **options: Any) -> Any:
        return self.app.tasks[task].apply_async((1, version), **options)

    def ran(self, count: int) -> list[str]:
        wait_until(lambda: self.witness.llen("runs") >= count, 40, what=lambda: str(self.runs()))
        return [version for version, _, _ in self.runs()]

    def runs(self) -> list[list[str]]:
        return [each.split(":") for each in self.witness.lrange("runs", 0, -1)]

    def meetings(self) -> int:
        return sum(int(met) for _, _, met in self.runs())

    def open(self, times: int = 1) -> None:
        self.witness.rpush("door:1", *["go"] * times)

    def left(self) -> None:
        """Remove a dead task from the record of running tasks."""
        self.witness.decr("inside:1")


def kill(worker: WorkerProcess) -> None:
    """Send SIGKILL to the worker and its pool."""
    for child in worker.children():
        child.kill()
    worker.stop(signal.SIGKILL)
