"""The start of a worker: seconds until it consumes, and its memory."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import psutil

from benchmarks.measure import Report, Series, dump, interleave, ratio
from benchmarks.shop import DEFAULTS
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS
from tests.workers import WorkerProcess

POOLS = {"solo": 1, "prefork": 2}


def startup(quick: bool) -> Report:
    """Measure the start of an idle worker in a new process, and the memory of all its processes."""
    report = Report("startup")
    report.header = ["pool", "broker", "s until it consumes", "vs stock", "MB", "vs stock"]
    report.notes.append("from the start of the process to the signal worker_ready; prefork has two processes")
    report.notes.append("MB: memory that no other process shares (USS), summed over the worker's processes")
    for pool in POOLS:
        found = interleave(ACTIVE, 2 if quick else 9, partial(_round, pool), 120)
        stock = found.get("stock", {})
        for name in ACTIVE:
            row = found[name]
            time_, memory = (ratio(row[key], stock.get(key, Series())) for key in ("seconds", "memory"))
            report.row(pool, name, row["seconds"], time_, row["memory"], memory)
        report.data[pool] = dump(found)
    return report


def _round(pool: str, broker: str) -> dict[str, float]:
    with RedisServer() as server:
        conf: dict[str, Any] = {**DEFAULTS, "broker_url": BROKERS[broker].url(server.port), "clock_port": 0}
        worker = WorkerProcess(
            "benchmarks.shop",
            broker=BROKERS[broker],
            conf=conf,
            pool=pool,
            concurrency=POOLS[pool],
            arguments=(),
            loglevel="WARNING",
        )
        started = time.monotonic()
        with worker:
            seconds = time.monotonic() - started
            processes = [psutil.Process(worker.pid), *worker.children()]
            memory = sum(process.memory_full_info().uss for process in processes)
    return {"seconds": seconds, "memory": memory / 1e6}
