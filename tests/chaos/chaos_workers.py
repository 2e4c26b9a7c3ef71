"""The workers under chaos: a fixed number of places, where a new worker replaces one that has ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from celery_dq.testing.waiting import wait_until
from tests.brokers import Broker
from tests.chaos.proxy import Proxy
from tests.workers import READY, WorkerProcess

#: Seconds that workers of even places wait for their tasks on SIGQUIT. Workers of odd places do not wait.
SOFT_TIMEOUT = 1.0


class WorkerPlace:
    """One place, with its own proxy between its workers and the broker."""

    def __init__(self, number: int, broker_port: int, behind_proxy: bool) -> None:
        self.number = number
        self.incarnation = 0
        self.proxy = Proxy(broker_port).start() if behind_proxy else None
        self.worker: WorkerProcess | None = None
        #: Whether a fault is under way here. Then the place stays empty, and no other fault hits it.
        self.busy = False

    @property
    def name(self) -> str:
        assert self.worker is not None
        return self.worker.name

    @property
    def consumes(self) -> bool:
        """Whether the present worker has begun to consume."""
        return self.worker is not None and self.worker.alive and READY in self.worker.log


class ChaosWorkers:
    def __init__(
        self,
        *,
        broker: Broker,
        conf: Mapping[str, Any],
        workers: int,
        pool: str,
        concurrency: int,
        broker_port: int,
        behind_proxy: bool,
    ) -> None:
        self._broker = broker
        self._conf = dict(conf)
        self._pool = pool
        self._concurrency = concurrency
        self.places = [WorkerPlace(number, broker_port, behind_proxy) for number in range(workers)]
        self._ended: list[WorkerProcess] = []

    def start(self) -> None:
        """Start a worker at each place and wait until all consume."""
        for place in self.places:
            self.fill(place)
        for place in self.places:
            assert place.worker is not None
            place.worker.wait_ready(60)

    def fill(self, place: WorkerPlace) -> None:
        """Start a worker at `place`; does not wait for it."""
        if place.worker is not None:
            self._ended.append(place.worker)
        place.incarnation += 1
        conf = dict(self._conf)
        conf["worker_soft_shutdown_timeout"] = 0.0 if place.number % 2 else SOFT_TIMEOUT
        if place.proxy is not None:
            conf["broker_url"] = self._broker.url(place.proxy.port)
        place.worker = WorkerProcess(
            "tests.chaos.tasks",
            broker=self._broker,
            conf=conf,
            pool=self._pool,
            concurrency=self._concurrency,
            name=f"place{place.number}-{place.incarnation}",
            loglevel="WARNING",
        ).start()

    def fill_empty(self) -> None:
        """Start a worker at each place whose worker has ended and where no fault is under way."""
        for place in self.places:
            if not place.busy and (place.worker is None or not place.worker.alive):
                self.fill(place)

    def logs(self) -> dict[str, str]:
        workers = self._ended + [place.worker for place in self.places if place.worker is not None]
        return {worker.name: worker.log for worker in workers}

    def dismiss(self) -> None:
        workers = [place.worker for place in self.places if place.worker is not None]
        for place in self.places:
            if place.proxy is not None:
                place.proxy.restore()
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGCONT)
                os.kill(worker.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            wait_until(lambda: not any(worker.alive for worker in workers), 10)
        for worker in workers + self._ended:
            worker.discard()
        for place in self.places:
            if place.proxy is not None:
                place.proxy.stop()
