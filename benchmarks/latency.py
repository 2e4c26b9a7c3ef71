"""The time from call to start on an idle worker."""

from __future__ import annotations

import time
from functools import partial

import redis
from kombu import pools

from benchmarks.measure import Report, benchmark, interleave, percentile
from benchmarks.workers import app_of, settings, worker_of
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS


@benchmark(
    "pool | broker | p50 ms | p99 ms | p50 vs stock | p99 vs stock",
    "the next one is sent when the last has run",
)
def latency(report: Report, quick: bool) -> None:
    """Milliseconds from ``apply_async`` to the task's first line, one at a time on an idle worker."""
    for pool in ("solo", "prefork"):
        found = interleave(ACTIVE, 2 if quick else 5, partial(_round, pool, 100 if quick else 400), 90)
        report.compare(found, "stock", "p50 | p99 | vs p50 | vs p99", pool)


def _round(pool: str, amount: int, broker: str) -> dict[str, float]:
    with RedisServer() as server, RedisServer() as clock:
        conf = settings(BROKERS[broker].url(server.port), clock.port)
        waits: list[float] = []
        with (
            app_of(broker, conf) as app,
            worker_of(broker, conf, pool=pool, concurrency=1),
            redis.Redis(port=clock.port, socket_timeout=None) as client,
        ):
            for _ in range(amount + 10):
                app.tasks["stamp"].apply_async((time.monotonic(),))
                stamped = client.blpop(["stamps"], timeout=30)
                if stamped is None:
                    raise TimeoutError(f"{broker} did not run a task within 30 s")
                waits.append(float(stamped[1]) * 1e3)
        pools.reset()
    # The first calls include the cost of new connections.
    return {"p50": percentile(waits[10:], 0.5), "p99": percentile(waits[10:], 0.99)}
