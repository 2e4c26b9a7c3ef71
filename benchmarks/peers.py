"""No-op tasks in other task queues, beside Celery on three brokers: calls/s and tasks/s of one process.

A peer that is not installed (``pip install --group peers``) is left out.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from benchmarks.measure import Report, benchmark, dump, interleave, ratio
from benchmarks.peer_apps import CLOCK, PEER_APPS, PeerApp
from benchmarks.workers import app_of, seconds_between_marks, settings, worker_of
from celery_dq.testing.servers import RedisServer
from tests.brokers import BROKERS
from tests.rabbitmq import RabbitMQServer, find_rabbitmq_server
from tests.workers import ROOT


class Promise(NamedTuple):
    """The acknowledgement as measured, and the documented fate of a task whose worker is killed."""

    acked: str
    unstarted: str
    running: str


EARLY, LATE = "at the start", "lost; with acks_late it runs again"
ONE = "none is fetched ahead"
PROMISES = {
    "celery-dq": Promise(EARLY, "back after dq_lease (15 s)", LATE),
    "celery, redis": Promise(EARLY, "back after visibility_timeout (1 h)", LATE),
    "celery, rabbitmq": Promise(EARLY, "back at once", LATE),
    "huey": Promise("never", ONE, "lost"),
    "dramatiq": Promise("at the end", "back after heartbeat_timeout (60 s)", "runs again"),
    "taskiq_redis": Promise("at the end", "back after idle_timeout (10 min)", "runs again"),
    "rq": Promise("at the end, in a registry", ONE, "fails; with Retry it runs again"),
}
#: The brokers of Celery in `tests.brokers`; '' for RabbitMQ.
CELERY = {"celery-dq": "dq", "celery, redis": "stock", "celery, rabbitmq": ""}
#: Calls and tasks before the first that counts. They connect, and learn the templates of tasks.
WARM_UP = 100


@benchmark(
    "queue | calls/s | vs celery, redis | tasks/s | vs celery, redis | acknowledged"
    " | killed: fetched, not started | killed: running",
    f"""
    each call has one argument and keeps no result; backlog published first, then the worker
    the first {WARM_UP} calls and tasks are not counted
    celery: solo pool, otherwise its defaults; huey: its default of one thread
    dramatiq: its default of 8 threads; taskiq: Redis streams, its default of 100 tasks at a time
    rabbitmq: at times the worker sleeps while messages wait, hence the range; the cause is not known
    rq: SimpleWorker, which does not fork for each task
    """,
)
def peers(report: Report, quick: bool) -> None:
    """Calls/s and no-op tasks/s of one process with one slot, and the fate of a killed worker's tasks."""
    present = [name for name in PROMISES if _is_installed(name)]
    if missing := [name for name in PROMISES if name not in present]:
        report.notes.append(f"not installed: {', '.join(missing)}")
        print(f"   {report.notes[-1]}", flush=True)
    once = partial(_round, 500 if quick else 3_000)
    found = interleave(present, 1 if quick else 5, once, 400)
    stock = found["celery, redis"]
    for name in present:
        row = found[name]
        cells = [row["calls"], ratio(row["calls"], stock["calls"])]
        cells += [row["tasks"], ratio(row["tasks"], stock["tasks"])]
        report.row(name, *cells, *PROMISES[name])
    report.data = dump(found)


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
        with _process(name, server.port, clock.port, str(amount)) as process:
            text, _ = process.communicate(timeout=300)
        taken = float(text.split()[-1])
        if name in CELERY:
            conf = _conf(name, server.port, clock.port)
            worker: Any = worker_of(CELERY[name], conf, pool="solo", concurrency=1, arguments=())
        else:
            worker = _process(name, server.port, clock.port, "work")
        with worker:
            return {"calls": amount / taken, "tasks": amount / seconds_between_marks(clock)}


def _conf(name: str, port: int, clock_port: int) -> dict[str, Any]:
    broker = CELERY[name]
    url = BROKERS[broker].url(port) if broker else f"amqp://guest:guest@127.0.0.1:{port}//"
    return settings(url, clock_port)


def _celery_app(name: str, port: int) -> PeerApp:
    app = app_of(CELERY[name], _conf(name, port, int(os.environ[CLOCK])))

    def publish(arguments: Iterable[str | int]) -> None:
        for argument in arguments:
            app.tasks["mark" if isinstance(argument, str) else "noop"].apply_async((argument,))

    return PeerApp(publish, app.worker_main)


@contextmanager
def _process(name: str, port: int, clock_port: int, task: str) -> Iterator[subprocess.Popen[str]]:
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
    app = _celery_app(name, port) if name in CELERY else PEER_APPS[name](port)
    if task == "work":
        app.work()
        return
    app.publish(range(WARM_UP))
    app.publish(["begin"])
    started = time.perf_counter()
    app.publish(range(int(task)))
    taken = time.perf_counter() - started
    app.publish(["end"])
    print(taken)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
