"""No-op tasks through a real worker, end to end."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import redis

from benchmarks.measure import Report, Series, dump, interleave, ratio
from benchmarks.shop import DEFAULTS, NAME, add_tasks
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS
from tests.workers import ROOT, WorkerProcess, make_app

#: Pool -> concurrency.
POOLS = {"solo": 1, "threads": 2, "prefork": 2}


def tasks(quick: bool) -> Report:
    """Measure no-op tasks/s from the first to the last of a backlog, by pool and kind of acks."""
    report = Report("tasks")
    report.header = ["pool", "acks", "broker", "tasks/s", "vs stock"]
    report.notes.append(
        "backlog published first, then the worker starts; Celery's default prefetch multiplier (4), no events"
    )
    report.notes.append("each task has one argument")
    report.notes.append("memory: Celery's floor, worker and broker in one process")
    amount = 1_000 if quick else 6_000
    for pool in POOLS:
        for acks in ("early", "late"):
            contenders = [*ACTIVE, "memory"] if pool == "solo" else list(ACTIVE)
            rounds = 1 if quick else 3
            found = interleave(contenders, rounds, partial(_round, pool, acks == "late", amount), 90)
            stock = found.get("stock", {}).get("rate", Series())
            for name in contenders:
                report.row(pool, acks, name, found[name]["rate"], ratio(found[name]["rate"], stock))
            report.data[f"{pool} {acks}"] = dump(found)
    return report


def _round(pool: str, late: bool, amount: int, broker: str) -> dict[str, float]:
    if broker == "memory":
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.shop", str(amount), "late" if late else "early", pool],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return {"rate": amount / float(done.stdout.split()[-1])}
    with RedisServer() as server, RedisServer() as clock:
        conf: dict[str, Any] = {
            **DEFAULTS,
            "broker_url": BROKERS[broker].url(server.port),
            "clock_port": clock.port,
            "task_acks_late": late,
        }
        app = add_tasks(make_app(NAME, BROKERS[broker], conf), clock.port)
        with app.producer_pool.acquire(block=True) as producer:
            app.tasks["mark"].apply_async(("begin",), producer=producer)
            for number in range(amount):
                app.tasks["noop"].apply_async((number,), producer=producer)
            app.tasks["mark"].apply_async(("end",), producer=producer)
        worker = WorkerProcess(
            "benchmarks.shop",
            broker=BROKERS[broker],
            conf=conf,
            pool=pool,
            concurrency=POOLS[pool],
            loglevel="WARNING",
        )
        with worker, redis.Redis(port=clock.port, socket_timeout=None) as client:
            begin, end = client.blpop(["begin"], timeout=60), client.blpop(["end"], timeout=120)
        app.close()
    if begin is None or end is None:
        raise TimeoutError(f"{broker} did not run {amount} tasks in {pool}")
    return {"rate": amount / (float(end[1]) - float(begin[1]))}
