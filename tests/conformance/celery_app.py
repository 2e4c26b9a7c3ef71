"""A Celery app and its worker processes, for the worker-level tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from celery import Celery
from celery.result import AsyncResult
from kombu import pools

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import Broker
from tests.conformance.shop import BROKER_DB, NAME, RESULT_DB, Witness, add_tasks
from tests.preloaded import run_python
from tests.workers import WorkerProcess, environment, make_app

_serial = count()


class CeleryApp:
    """The caller's side: the app, the witness, and workers that share the app's settings."""

    def __init__(
        self, broker: Broker, server: RedisServer, queue: str = "", broker_port: int = 0, **conf: Any
    ) -> None:
        self.broker = broker
        self.server = server
        self.queue = queue or f"shop-{next(_serial)}"
        self.conf: dict[str, Any] = {
            "broker_url": broker.url(broker_port or server.port, BROKER_DB),
            "result_backend": f"redis://127.0.0.1:{server.port}/{RESULT_DB}",
            "task_default_queue": self.queue,
            "witness_port": server.port,
            "result_backend_transport_options": {"retry_policy": {"max_retries": 2, "interval_start": 0}},
            "task_track_started": True,
            **conf,
        }
        self.app: Celery = add_tasks(make_app(NAME, broker, self.conf), server.port)
        self.witness = Witness(server.port)
        self.shared_worker: WorkerProcess | None = None

    def worker(self, pool: str = "prefork", concurrency: int = 2, **options: Any) -> WorkerProcess:
        """Make a worker, which starts as a context manager."""
        conf = {**self.conf, **options.pop("conf", {})}
        return WorkerProcess(
            options.pop("module", "tests.conformance.shop"),
            broker=self.broker,
            conf=conf,
            pool=pool,
            concurrency=concurrency,
            preloaded=True,
            **options,
        )

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        """Call ``apply_async`` of the task with this name."""
        return self.app.tasks[task].apply_async(args, **options)

    def signature(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.tasks[task].signature(args, **options)

    def waiting(self) -> int:
        """The number of waiting messages, by ``celery amqp queue.declare <name> passive``."""
        with self.app.connection_for_read() as connection:
            try:
                channel: Any = connection.default_channel
                return int(channel.queue_declare(self.queue, passive=True).message_count)
            except connection.channel_errors:
                return 0

    def purge(self) -> int:
        """Remove the waiting messages of the queue; return their number."""
        with self.app.connection_for_write() as connection:
            channel: Any = connection.default_channel
            return int(channel.queue_purge(self.queue))

    def ask(self, method: str, *args: Any, destinations: Sequence[str] = (), **options: Any) -> Any:
        """Send an `inspect` command; return the answer of the only worker."""
        inspect = self.app.control.inspect(timeout=2, limit=1, destination=list(destinations) or None)
        # A green worker prints "ready" before its mailbox is open: ask again.
        answer = wait_until(
            lambda: getattr(inspect, method)(*args, **options), 40, what=f"an answer to {method}"
        )
        (only,) = answer.values()
        return only

    def order(self, method: str, *args: Any) -> Any:
        """Send an idempotent `control` command; return the answer of the only worker."""
        control = getattr(self.app.control, method)
        return wait_until(
            lambda: control(*args, reply=True, timeout=5, limit=1), 40, what=f"an answer to {method}"
        )

    def let_pass(self, task_id: str, deadline: float) -> None:
        """Wait until the only worker has ended a task that was sent before now, in any state.

        A result does not show this end: Celery 5.7 records a task as revoked when it receives the revoke.
        """
        # Messages are received in the order in which they were sent.
        assert self.send("add", 1, 1).get(timeout=deadline) == 2
        wait_until(lambda: not self.ask("query_task", task_id), deadline, what="the end of the task")

    def command(self, *arguments: str) -> str:
        """Run ``celery <arguments>`` against the app; return the output."""
        words = ("-m", "celery", "-A", "tests.conformance.shop", *arguments)
        done = run_python(*words, environment=environment(self.broker, self.conf))
        return done.stdout + done.stderr

    def close(self) -> None:
        self.app.close()
        # kombu shares pools by URL: the next app must not inherit connections that a test has cut.
        pools.reset()
        self.witness.close()
