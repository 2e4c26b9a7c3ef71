"""A worker in this process, on a real broker, whose tasks wait at barriers that the test opens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.worker import state
from kombu.asynchronous import set_event_loop

import celery_dq
from celery_dq.dedup import dedup


class Shop:
    """An app with tasks that wait at a barrier, and a record of their runs."""

    def __init__(self, broker_url: str, backend_url: str, **conf: Any) -> None:
        self.app: Any = Celery("shop", broker=broker_url, backend=backend_url, set_as_current=False)
        self.app.conf.update(
            task_default_queue="cache",
            worker_hijack_root_logger=False,
            broker_connection_retry_on_startup=True,
        )
        self.app.conf.update(conf)
        celery_dq.setup(self.app)
        self._doors: dict[Any, threading.Semaphore] = {}
        self.runs: list[tuple[str, Any]] = []  # (task id, argument) in order of their starts
        self.now: list[Any] = []
        self.overlaps: list[Any] = []
        self.tokens: list[int] = []
        self.attempts = 0
        shop = self

        @self.app.task(shared=False, name="refresh", bind=True)
        @dedup(key="{sku}")
        def refresh(task: Any, sku: Any, version: int = 0) -> Any:
            return shop.work(task, sku, version)

        @self.app.task(shared=False, name="latest", bind=True)
        @dedup(key="{sku}", on_duplicate="replace")
        def latest(task: Any, sku: Any, version: int = 0) -> Any:
            return shop.work(task, sku, version)

        @self.app.task(
            shared=False, name="strict", bind=True, dedup={"key": "{sku}", "on_duplicate": "raise"}
        )
        def strict(task: Any, sku: Any) -> Any:
            return shop.work(task, sku, 0)

        @self.app.task(shared=False, name="failing", bind=True, max_retries=2)
        @dedup(key="{sku}")
        def failing(task: Any, sku: Any, countdown: float | None = 0.0, eta: Any = None) -> Any:
            shop.work(task, sku, task.request.retries)
            if task.request.retries < 2:
                raise task.retry(countdown=countdown, eta=eta)
            return "done"

        @self.app.task(
            shared=False,
            name="auto",
            bind=True,
            autoretry_for=(KeyError,),
            retry_backoff=False,
            default_retry_delay=0,
        )
        @dedup(key="{sku}")
        def auto(task: Any, sku: Any) -> Any:
            shop.work(task, sku, task.request.retries)
            if task.request.retries < 1:
                raise KeyError(sku)
            return "done"

        @self.app.task(shared=False, name="replaced", bind=True)
        @dedup(key="{sku}", name="shared")
        def replaced(task: Any, sku: Any) -> Any:
            shop.work(task, sku, 0)
            raise task.replace(shop.app.tasks["successor"].s(sku))

        @self.app.task(shared=False, name="successor", bind=True)
        @dedup(key="{sku}", name="shared")
        def successor(task: Any, sku: Any) -> Any:
            return shop.work(task, sku, 1)

        @self.app.task(shared=False, name="note")
        def note(value: Any, extra: Any = None) -> Any:
            shop.runs.append(("note", value))
            return value

        @self.app.task(shared=False, name="caller")
        def caller(sku: Any) -> None:
            shop.app.tasks["refresh"].delay(sku)

        @self.app.task(shared=False, name="broken")
        @dedup(key="{sku}")
        def broken(sku: Any) -> None:
            shop.door(sku).acquire(timeout=60)
            raise ValueError(sku)

    def close(self) -> None:
        self.app.pool.force_close_all()
        self.app.close()

    def work(self, task: Any, sku: Any, version: int) -> Any:
        if sku in self.now:
            self.overlaps.append(sku)
        self.now.append(sku)
        self.tokens.append(task.request.dq_token)
        # Last, because tests wait for it, and then read the other records.
        self.runs.append((task.request.id, version))
        try:
            if not self.door(sku).acquire(timeout=60):
                raise TimeoutError(sku)
        finally:
            self.now.remove(sku)
        return [sku, version]

    @property
    def queue(self) -> str:
        name: str = self.app.conf.task_default_queue
        return name

    def task(self, name: str) -> Any:
        return self.app.tasks[name]

    def door(self, sku: Any) -> threading.Semaphore:
        # One atomic step: a task and its test may both come first, and must get the same barrier.
        return self._doors.setdefault(sku, threading.Semaphore(0))

    def open(self, sku: Any, times: int = 1) -> None:
        self.door(sku).release(times)

    def ran(self) -> list[Any]:
        return [version for _, version in self.runs]

    @contextmanager
    def working(self, concurrency: int = 4, **options: Any) -> Iterator[Any]:
        # A second worker in a process would find the loop of the first, in which Celery 5.5 runs no timers.
        set_event_loop(None)
        with start_worker(
            self.app,
            pool="threads",
            concurrency=concurrency,
            perform_ping_check=False,
            shutdown_timeout=20,
            loglevel="WARNING",
            **options,
        ) as worker:
            yield worker
            stop(worker)


def stop(worker: Any) -> None:
    """Stop a worker as SIGTERM does: running tasks end before the worker does."""
    ours, theirs = socket.socketpair()
    flags: Any = state
    with closing(ours), closing(theirs):
        flags.should_stop = 0
        try:
            if worker.consumer.hub is not None:
                # The worker checks the flag in the next turn of its loop: at once, when the loop has input.
                theirs.send(b"1")
                worker.consumer.hub.add_reader(ours, partial(worker.consumer.hub.remove_reader, ours))
            worker.blueprint.join(40)
        finally:
            flags.should_stop = None
