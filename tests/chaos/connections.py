"""Faults between one busy worker and its server: cuts, a server that hangs, a task that keeps the GIL.

``python -m tests.chaos.connections [--cuts 1000] [--pools solo threads]`` prints a row for each fault and
pool, with early and with late acks. It ends with status 1 when a message was lost, or ran twice with early.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import redis
from celery import Celery

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.chaos.proxy import Proxy
from tests.workers import ENVIRONMENT, WorkerProcess, app_from_environment, make_app

NAME = "connections"
POOLS = ("solo", "threads", "prefork", "gevent", "eventlet")
#: Waiting messages that the feeder keeps in the queue, so that the worker never waits.
BACKLOG = 300
#: A pattern whose time doubles with each letter of its text. The module `re` keeps the GIL meanwhile.
BAD_PATTERN = re.compile(r"(a|a)+$")
#: Runs that count as progress after a fault.
PROGRESS = 10


def add_tasks(app: Celery, ledger_port: int) -> Celery:
    ledger = redis.Redis(port=ledger_port, socket_timeout=None)

    @app.task(name="early", shared=False, ignore_result=True)
    def early(number: int) -> None:
        ledger.rpush("ran", number)

    @app.task(name="late", shared=False, ignore_result=True, acks_late=True)
    def late(number: int) -> None:
        ledger.rpush("ran", number)

    @app.task(name="keep_the_gil", shared=False, ignore_result=True)
    def keep_the_gil(letters: int) -> None:
        ledger.rpush("keeping", os.getpid())
        BAD_PATTERN.match("a" * letters + "b")
        ledger.rpush("kept", os.getpid())

    return app


if ENVIRONMENT in os.environ:
    app = app_from_environment(NAME)
    add_tasks(app, int(app.conf["ledger_port"]))


class Load:
    """A feeder that keeps messages waiting, and the ledger of what ran."""

    def __init__(self, app: Celery, ledger_port: int, task: str) -> None:
        self.app = app
        self._task = app.tasks[task]
        self.ledger = redis.Redis(port=ledger_port, socket_timeout=None)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._sent = 0

    def start(self) -> Load:
        self._thread.start()
        return self

    def _feed(self) -> None:
        while not self._stopped.is_set():
            if self._sent - self.ran() > BACKLOG:
                self._stopped.wait(0.01)
                continue
            for _ in range(50):
                self._task.delay(self._sent)
                self._sent += 1

    def ran(self) -> int:
        """Return the number of runs so far."""
        return self.ledger.llen("ran")

    def await_progress(self, before: int) -> float:
        """Wait until there are some more runs than `before`. Return the seconds."""
        began = time.monotonic()
        wait_until(lambda: self.ran() >= before + PROGRESS, 120, what="further runs")
        return time.monotonic() - began

    def settle(self) -> tuple[int, int, int]:
        """Let the worker run what is left. Return how many messages were sent, were lost, and ran twice."""
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: len(self._runs()) >= self._sent, 120)
        runs = self._runs()
        return self._sent, self._sent - len(runs), sum(1 for count in runs.values() if count > 1)

    def _runs(self) -> Counter[bytes | str]:
        return Counter(self.ledger.lrange("ran", 0, -1))


class Place(NamedTuple):
    """Where a fault happens: one worker, under load, behind a proxy before its server."""

    server: RedisServer
    proxy: Proxy
    load: Load


def cut(place: Place, cuts: int) -> Iterator[float]:
    """Close all connections of the worker, each time after it has gone on."""
    for _ in range(cuts):
        before = place.load.ran()
        place.proxy.sever()
        yield place.load.await_progress(before)


def hang(place: Place, seconds: float) -> Iterator[float]:
    """Stop the process of the server for a while."""
    place.server.pause()
    try:
        time.sleep(seconds)  # duration of the fault
    finally:
        before = place.load.ran()
        place.server.resume()
    yield place.load.await_progress(before)


def keep_the_gil(place: Place, letters: int) -> Iterator[float]:
    """Let a task keep the GIL of its process for some ten seconds."""
    place.load.app.tasks["keep_the_gil"].delay(letters)
    wait_until(lambda: place.load.ledger.exists("kept"), 300, what="the end of the match")
    yield place.load.await_progress(place.load.ran())


def letters_for(seconds: float) -> int:
    """Return how many letters the bad pattern needs, so that it takes this long or longer."""
    began = time.perf_counter()
    BAD_PATTERN.match("a" * 18 + "b")
    return 18 + math.ceil(math.log2(seconds / (time.perf_counter() - began)))


def run(pool: str, acks: str, fault: Callable[[Place], Iterator[float]]) -> tuple[int, int, int, list[float]]:
    """Run a fault. Return the messages sent, lost and run twice, and the seconds until the worker went on."""
    broker = BROKERS["dq"]
    with RedisServer() as server, RedisServer() as ledger, contextlib.ExitStack() as stack:
        proxy = Proxy(server.port).start()
        stack.callback(proxy.stop)
        conf = {"ledger_port": ledger.port, "worker_prefetch_multiplier": 4}
        # The feeder outlasts a server that hangs.
        sends = {"broker_url": broker.url(server.port), "dq_publish_timeout": 120}
        producer = make_app(NAME, broker, {**conf, **sends})
        stack.callback(producer.close)
        worker = WorkerProcess(
            "tests.chaos.connections",
            broker=broker,
            conf={**conf, "broker_url": broker.url(proxy.port)},
            pool=pool,
            concurrency=1 if pool == "solo" else 4,
            loglevel="WARNING",
        )
        with worker:
            load = Load(add_tasks(producer, ledger.port), ledger.port, acks).start()
            load.await_progress(0)
            waits_s = list(fault(Place(server, proxy, load)))
            return (*load.settle(), waits_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults and print a row for each; return the exit status."""
    parser = argparse.ArgumentParser(description="python -m tests.chaos.connections")
    parser.add_argument("--cuts", type=int, default=1000, help="of each pool; default %(default)s")
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=POOLS)
    options = parser.parse_args(arguments)
    letters = letters_for(10)
    faults: dict[str, Callable[[Place], Iterator[float]]] = {
        f"{options.cuts} cuts": lambda place: cut(place, options.cuts),
        "server hangs 5 s": lambda place: hang(place, 5),
        "server hangs 30 s": lambda place: hang(place, 30),
        "GIL kept 10 s": lambda place: keep_the_gil(place, letters),
    }
    broken = 0
    for pool, (name, fault), acks in itertools.product(options.pools, faults.items(), ("early", "late")):
        sent, lost, twice, waits_s = run(pool, acks, fault)
        broken += lost + (twice if acks == "early" else 0)
        print(
            f"{pool:9}{name:19}{acks:7}{sent:7} messages, lost {lost}, twice {twice}; "
            f"went on after {statistics.median(waits_s):.2f} s (max {max(waits_s):.2f} s)",
            flush=True,
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
