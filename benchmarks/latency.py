"""Publishing from Celery: calls per second, and the time from call to start on an idle worker."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import redis
from kombu import pools

from benchmarks.measure import Report, Series, dump, interleave, percentile, ratio
from benchmarks.shop import DEFAULTS, NAME, add_tasks
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS
from tests.workers import WorkerProcess, make_app


def latency(quick: bool) -> Report:
    """Milliseconds from ``apply_async`` to the task's first line, one at a time on an idle worker."""
    report = Report("latency")
    report.header = ["pool", "broker", "p50 ms", "p99 ms", "p50 vs stock", "p99 vs stock"]
    report.notes.append("the next one is sent when the last has run")
    for pool in ("solo", "prefork"):
        found = interleave(ACTIVE, 2 if quick else 5, partial(_latency, pool, 100 if quick else 400), 90)
        stock = found.get("stock", {})
        for name in ACTIVE:
            row = found[name]
            against = [ratio(row[key], stock.get(key, Series())) for key in ("p50", "p99")]
            report.row(pool, name, row["p50"], row["p99"], *against)
        report.data[pool] = dump(found)
    return report


def _latency(pool: str, amount: int, broker: str) -> dict[str, float]:
    with RedisServer() as server, RedisServer() as clock:
        url = BROKERS[broker].url(server.port)
        conf: dict[str, Any] = {**DEFAULTS, "broker_url": url, "clock_port": clock.port}
        app = add_tasks(make_app(NAME, BROKERS[broker], conf), clock.port)
        worker = WorkerProcess(
            "benchmarks.shop", broker=BROKERS[broker], conf=conf, pool=pool, concurrency=1, loglevel="WARNING"
        )
        waits: list[float] = []
        with worker, redis.Redis(port=clock.port, socket_timeout=None) as client:
            for _ in range(amount + 10):
                app.tasks["stamp"].apply_async((time.monotonic(),))
                stamped = client.blpop(["stamps"], timeout=30)
                if stamped is None:
                    raise TimeoutError(f"{broker} did not run a task within 30 s")
                waits.append(float(stamped[1]) * 1e3)
        app.close()
        pools.reset()
    # The first calls include the cost of new connections.
    return {"p50": percentile(waits[10:], 0.5), "p99": percentile(waits[10:], 0.99)}
