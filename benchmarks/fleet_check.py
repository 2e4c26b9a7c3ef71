"""The model of ``fleet`` beside measurements on this machine, with one to three partitions and masters."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import psutil

from benchmarks.cluster import servers
from benchmarks.fleet import WORKER_US, Plan, fleet
from benchmarks.measure import Report, ServerProbe, dump, interleave, short
from benchmarks.shop import DEFAULTS, NAME, add_tasks
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.workers import WorkerProcess, make_app

#: Messages/s in all, broker and partitions of each case.
CASES = {
    "1 server, 1 partition, 100/s": (100.0, "dq", 1),
    "1 server, 1 partition, 500/s": (500.0, "dq", 1),
    "1 server, 2 partitions, 500/s": (500.0, "dq", 2),
    "1 server, 3 partitions, 500/s": (500.0, "dq", 3),
    "3 masters, 3 partitions, 500/s": (500.0, "cluster", 3),
}
TENANTS = 300
QUEUE = "push"


def fleet_check(quick: bool) -> Report:
    """Compare the CPU time of a message with that of the model."""
    report = Report("fleet_check")
    report.header = ["case", "run/s", "redis µs", "model", "error %", "worker µs", "model", "error %"]
    report.notes.append("one worker, threads pool with 2 slots; one apply_async at a time; idle CPU included")
    report.notes.append(f"no-op tasks of {TENANTS} tenants; µs of CPU: of all masters, of the worker")
    report.notes.append("error: of the model, beside the measured figure")
    found = interleave(list(CASES), 1 if quick else 3, partial(_round, 4.0 if quick else 15.0), 600)
    for name, row in found.items():
        rate, broker, partitions = CASES[name]
        size = fleet(Plan(name, rate, TENANTS, partitions, on_cluster=broker == "cluster"))
        cells: list[object] = []
        for quantity, model in (("redis", size.redis_us), ("worker", WORKER_US.value)):
            cells += [row[quantity], short(model), f"{100 * (model / row[quantity].median - 1):+.0f}"]
        report.row(name, row["rate"], *cells)
    report.data["fleet_check"] = dump(found)
    return report


def _round(seconds: float, case: str) -> dict[str, float]:
    rate, name, partitions = CASES[case]
    broker = BROKERS[name]
    with ExitStack() as stack:
        url, ports = stack.enter_context(servers(name))
        conf: dict[str, Any] = {
            **DEFAULTS,
            "broker_url": url,
            "clock_port": 0,
            "dq_queues": {QUEUE: {"partitions": partitions}},
        }
        app: Any = add_tasks(make_app(NAME, broker, conf), 0)
        stack.callback(app.close)
        worker = WorkerProcess(
            "benchmarks.shop", broker=broker, conf=conf, pool="threads", queues=[QUEUE], loglevel="WARNING"
        )
        stack.callback(worker.discard)
        worker.start().wait_ready()
        probes = [ServerProbe(port) for port in ports]
        for probe in probes:
            stack.callback(probe.close)
        process = psutil.Process(worker.pid)
        _publish(app, rate, 1.0)  # loads the scripts, and makes the connections
        _await_end(app)
        redis_s, worker_s = sum(probe.cpu_seconds() for probe in probes), sum(process.cpu_times()[:2])
        started = time.monotonic()
        amount = _publish(app, rate, seconds)
        _await_end(app)
        took_s = time.monotonic() - started
        redis_s = sum(probe.cpu_seconds() for probe in probes) - redis_s
        worker_s = sum(process.cpu_times()[:2]) - worker_s
    return {"rate": amount / took_s, "redis": redis_s / amount * 1e6, "worker": worker_s / amount * 1e6}


def _await_end(app: Any) -> None:
    def is_empty() -> bool:
        queue = app.dq.queues[QUEUE].snapshot()
        return bool(queue.waiting + queue.held == 0)

    wait_until(is_empty, 60.0)


def _publish(app: Any, rate: float, seconds: float) -> int:
    """Publish at a steady rate, late messages at once; return their number."""
    amount, due = int(rate * seconds), time.monotonic()
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(amount):
            time.sleep(max(0.0, due - time.monotonic()))  # the interval of the messages
            app.tasks["noop"].apply_async(queue=QUEUE, tenant=f"t{number % TENANTS}", producer=producer)
            due += 1 / rate
    return amount
