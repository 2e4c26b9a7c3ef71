"""The start of a worker: seconds until it consumes, and its memory."""

from __future__ import annotations

import time
from functools import partial

import psutil

from benchmarks.measure import Report, benchmark, interleave
from benchmarks.workers import settings, worker_of
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS

POOLS = {"solo": 1, "prefork": 2}


@benchmark(
    "pool | broker | s until it consumes | vs stock | MB | vs stock",
    """
    from the start of the process to the signal worker_ready; prefork has two processes
    MB: memory that no other process shares (USS), summed over the worker's processes
    """,
)
def startup(report: Report, quick: bool) -> None:
    """Measure the start of an idle worker in a new process, and the memory of all its processes."""
    for pool in POOLS:
        found = interleave(ACTIVE, 2 if quick else 9, partial(_round, pool), 120)
        report.compare(found, "stock", "seconds | vs seconds | memory | vs memory", pool)


def _round(pool: str, broker: str) -> dict[str, float]:
    with RedisServer() as server:
        conf = settings(BROKERS[broker].url(server.port))
        started = time.monotonic()
        with worker_of(broker, conf, pool=pool, concurrency=POOLS[pool], arguments=()) as worker:
            seconds = time.monotonic() - started
            processes = [psutil.Process(worker.pid), *worker.children()]
            memory = sum(process.memory_full_info().uss for process in processes)
    return {"seconds": seconds, "memory": memory / 1e6}
