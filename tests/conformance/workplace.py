"""A Celery app beside workers of its own: what the worker-level tests stand on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from celery_dq.testing.servers import RedisServer
from tests.brokers import Broker
from tests.conformance.shop import BROKER_DB, NAME, RESULT_DB, Witness, add_tasks
from tests.workers import WorkerProcess, make_app

_serial = count()


class Workplace:
    """The caller's side: the app, the witness, and workers that share the app's settings."""

    def __init__(self, broker: Broker, server: RedisServer, queue: str = "", **conf: Any) -> None:
        self.broker = broker
        self.server = server
        self.queue = queue or f"shop-{next(_serial)}"
        self.conf: dict[str, Any] = {
            "broker_url": broker.url(server.port, BROKER_DB),
            "result_backend": f"redis://127.0.0.1:{server.port}/{RESULT_DB}",
            "task_default_queue": self.queue,
            "witness_port": server.port,
            "task_track_started": True,
            **conf,
        }
        self.app: Celery = add_tasks(make_app(NAME, broker, self.conf), server.port)
        self.witness = Witness(server.port)
        self.shared_worker: WorkerProcess | None = None

    def worker(self, pool: str = "prefork", concurrency: int = 2, **options: Any) -> WorkerProcess:
        """A worker that is not started yet; a context manager."""
        conf = {**self.conf, **options.pop("conf", {})}
        return WorkerProcess(
            "tests.conformance.shop", broker=self.broker, conf=conf, pool=pool, concurrency=concurrency, **options
        )

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        """``apply_async`` of the task of that name."""
        return self.app.tasks[task].apply_async(args, **options)

    def signature(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.tasks[task].signature(args, **options)

    def waiting(self) -> int:
        """Messages waiting in the queue, as ``celery amqp queue.declare <name> passive`` tells."""
        with self.app.connection_for_read() as connection:
            try:
                return int(connection.default_channel.queue_declare(self.queue, passive=True).message_count)
            except connection.channel_errors:
                return 0

    def ask(self, method: str, *args: Any, destinations: Sequence[str] = (), **options: Any) -> Any:
        """An `inspect` question; the answer of the only worker."""
        inspect = self.app.control.inspect(timeout=5, limit=1, destination=list(destinations) or None)
        answer = getattr(inspect, method)(*args, **options)
        assert answer is not None, f"no answer to {method}"
        (only,) = answer.values()
        return only

    def close(self) -> None:
        self.app.close()
        self.witness.close()
