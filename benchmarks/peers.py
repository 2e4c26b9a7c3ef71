"""No-op tasks in other task queues, beside Celery on three brokers: calls/s and tasks/s of one process.

A peer that is not installed (``pip install -e '.[peers]'``) is left out.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import redis
from kombu import pools

from benchmarks.measure import Report, dump, interleave, ratio
from benchmarks.peer_apps import CLOCK, PEER_APPS
from benchmarks.shop import DEFAULTS, NAME, add_tasks
from celery_dq.testing.rabbitmq import RabbitMQServer, find_rabbitmq_server
from celery_dq.testing.servers import RedisServer
from tests.brokers import BROKERS
from tests.workers import ROOT, WorkerProcess, make_app


class Promise(NamedTuple):
    """The documented fate of a task whose worker is killed."""

    unstarted: str
    running: str


LATE = "runs again with acks_late"
PROMISES = {
    "celery-dq": Promise("back after dq_lease (15 s)", LATE),
    "celery, redis": Promise("back after visibility_timeout (1 h)", LATE),
    "celery, rabbitmq": Promise("back at once", LATE),
    "huey": Promise("stays in the queue", "lost: no acks"),
    "dramatiq": Promise("back after heartbeat_timeout (60 s)", "runs again"),
    "taskiq_redis": Promise("back after idle_timeout (10 min)", "runs again"),
    "rq": Promise("stays in the queue", "fails, runs again with Retry"),
}
CELERY = {"celery-dq": "dq", "celery, redis": "stock", "celery, rabbitmq": ""}


def peers(quick: bool) -> Report:
    """Calls/s and no-op tasks/s of one process with one slot, and the fate of a killed worker's tasks."""
    report = Report("peers")
    report.header = ["queue", "calls/s", "vs celery, redis", "tasks/s", "vs celery, redis"]
    report.header += ["killed: fetched, not started", "killed: running"]
    report.notes.append(
        "each call has one argument and keeps no result; backlog published first, then the worker"
    )
    report.notes.append(
        "celery: solo pool, defaults, early acks; huey, dramatiq: one thread; rq: SimpleWorker"
    )
    report.notes.append("taskiq: Redis streams, one task at a time")
    present = [name for name in PROMISES if _is_installed(name)]
    if missing := [name for name in PROMISES if name not in present]:
        report.notes.append(f"not installed: {', '.join(missing)}")
    once = partial(_round, 500 if quick else 5_000)
    found = interleave(present, 1 if quick else 5, once, 60 if quick else 600)
    stock = found["celery, redis"]
    for name in present:
        row = found[name]
        cells = [row["calls"], ratio(row["calls"], stock["calls"])]
        cells += [row["tasks"], ratio(row["tasks"], stock["tasks"])]
        report.row(name, *cells, *PROMISES[name])
    report.data = dump(found)
    return report


def _is_installed(name: str) -> bool:
    if name == "celery, rabbitmq":
        try:
            return bool(find_rabbitmq_server())
        except FileNotFoundError:
            return False
    return name in CELERY or importlib.util.find_spec(name) is not None


def _round(amount: int, name: str) -> dict[str, float]:
    server = RabbitMQServer() if name == "celery, rabbitmq" else RedisServer()
    with server, RedisServer() as clock:
        if name in CELERY:
            url = BROKERS[CELERY[name]].url(server.port) if CELERY[name] else server.url()
            taken = _publish_on_celery(name, url, clock.port, amount)
            worker: Any = _celery_worker(name, url, clock.port)
        else:
            taken = _publish_on_peer(name, server.port, clock.port, amount)
            worker = _peer_process(name, server.port, clock.port, "work")
        with worker, redis.Redis(port=clock.port, socket_timeout=None) as client:
            begin, end = client.blpop(["begin"], timeout=60), client.blpop(["end"], timeout=300)
    if begin is None or end is None:
        raise TimeoutError(f"{name} did not run {amount} tasks")
    return {"calls": amount / taken, "tasks": amount / (float(end[1]) - float(begin[1]))}


def _conf(url: str, clock_port: int) -> dict[str, Any]:
    return {**DEFAULTS, "broker_url": url, "clock_port": clock_port}


def _publish_on_celery(name: str, url: str, clock_port: int, amount: int) -> float:
    broker = BROKERS[CELERY[name]] if CELERY[name] else None
    app = add_tasks(make_app(NAME, broker, _conf(url, clock_port)), clock_port)
    app.tasks["mark"].apply_async(("begin",))
    started = time.perf_counter()
    for number in range(amount):
        app.tasks["noop"].apply_async((number,))
    taken = time.perf_counter() - started
    app.tasks["mark"].apply_async(("end",))
    app.close()
    pools.reset()
    return taken


def _celery_worker(name: str, url: str, clock_port: int) -> WorkerProcess:
    return WorkerProcess(
        "benchmarks.shop",
        broker=BROKERS[CELERY[name]] if CELERY[name] else None,
        conf=_conf(url, clock_port),
        pool="solo",
        concurrency=1,
        loglevel="WARNING",
    )


def _publish_on_peer(name: str, port: int, clock_port: int, amount: int) -> float:
    with _peer_process(name, port, clock_port, str(amount)) as process:
        text, _ = process.communicate(timeout=300)
    return float(text.split()[-1])


@contextmanager
def _peer_process(name: str, port: int, clock_port: int, task: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers", name, str(port), task],
        cwd=ROOT,
        env={**os.environ, CLOCK: str(clock_port)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _main(name: str, port: int, task: str) -> None:
    app = PEER_APPS[name](port)
    if task == "work":
        app.work()
        return
    app.publish(["begin"])
    started = time.perf_counter()
    app.publish(range(int(task)))
    taken = time.perf_counter() - started
    app.publish(["end"])
    print(taken)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
