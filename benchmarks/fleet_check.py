"""The model of ``fleet`` beside measurements on this machine, with one to three partitions and masters."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from benchmarks.cluster import servers
from benchmarks.fleet import WORKER_US, Plan, size_of
from benchmarks.measure import Report, benchmark, dump, interleave, short, spending
from benchmarks.workers import app_of, await_end, settings, worker_of

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


@benchmark(
    "case | run/s | redis µs | model | error % | worker µs | model | error %",
    f"""
    one worker, threads pool with 2 slots; one apply_async at a time; idle CPU included
    no-op tasks of {TENANTS} tenants; µs of CPU: of all masters, of the worker
    error: of the model, beside the measured figure
    """,
)
def fleet_check(report: Report, quick: bool) -> None:
    """Compare the CPU time of a message with that of the model."""
    found = interleave(list(CASES), 1 if quick else 3, partial(_round, 4.0 if quick else 15.0), 600)
    for name, row in found.items():
        rate, broker, partitions = CASES[name]
        size = size_of(Plan(name, rate, TENANTS, partitions, on_cluster=broker == "cluster"))
        cells: list[object] = []
        for quantity, model in (("cpu", size.redis_us), ("others", WORKER_US.value)):
            cells += [row[quantity], short(model), f"{100 * (model / row[quantity].median - 1):+.0f}"]
        report.row(name, row["rate"], *cells)
    report.data = dump(found)


def _round(seconds: float, case: str) -> dict[str, float]:
    rate, broker, partitions = CASES[case]
    with servers(broker) as (url, ports):
        conf = settings(url, dq_queues={QUEUE: {"partitions": partitions}})
        with (
            app_of(broker, conf) as app,
            worker_of(broker, conf, pool="threads", queues=[QUEUE]) as worker,
        ):
            _publish(app, rate, 1.0)  # loads the scripts, and makes the connections
            with spending(*ports, pids=[worker.pid]) as spent:
                amount = _publish(app, rate, seconds)
    return spent.per(amount)


def _publish(app: Any, rate: float, seconds: float) -> int:
    """Publish at a steady rate, late messages at once; wait until they have run, and return their number."""
    amount, due = int(rate * seconds), time.monotonic()
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(amount):
            time.sleep(max(0.0, due - time.monotonic()))  # the interval of the messages
            app.tasks["noop"].apply_async(queue=QUEUE, tenant=f"t{number % TENANTS}", producer=producer)
            due += 1 / rate
    await_end(app, QUEUE)
    return amount
