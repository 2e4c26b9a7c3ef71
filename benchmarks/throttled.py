"""A service that answers 429 with Retry-After: calls before that time, and how soon tasks run after it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any

import redis

from benchmarks.measure import Report, benchmark, interleave, quantiles_ms
from benchmarks.workers import app_of, await_end, settings, worker_of
from celery_dq.testing.servers import RedisServer
from tests.brokers import DQ

QUEUE = "calls"
TENANTS, THROTTLED, WORKERS, THREADS = 100, 20, 4, 4
#: Seconds of a Retry-After, and of service between two of them.
RETRY_AFTER_S = 1.0
#: Calls per second of all tenants.
RATE = 60


@benchmark(
    "by | tenants | throttled | workers | answers 429 | calls in a pause | p50 ms | p99 ms | most ms"
    " | others ms",
    """
    tenants have a concurrency of 1; together {rate} calls/s, for {seconds:g} s; Retry-After {retry_after:g} s
    Throttled: raise Throttled(retry_after); retry: raise self.retry(countdown=retry_after)
    calls in a pause: by a tenant between its 429 and the end of the Retry-After, by the clock of the service
    p50, p99, most: from the end of the Retry-After to the next call of the tenant
    others: median time from apply_async to the call, of the tenants that the service does not limit
    """,
)
def throttled(report: Report, quick: bool) -> None:
    """Measure the calls to a service while it answers 429, and the recovery after it."""
    seconds = 6.0 if quick else 30.0
    report.fill_in(rate=RATE, seconds=seconds, retry_after=RETRY_AFTER_S)
    found = interleave(("Throttled", "retry"), 1 if quick else 3, partial(_round, seconds), 240)
    for name, row in found.items():
        cells = [row[each] for each in ("answers", "early", "p50", "p99", "max", "usual")]
        report.row(name, TENANTS, THROTTLED, WORKERS, *cells)
        report.data[name] = {each: series.values for each, series in row.items()}


def _round(seconds: float, how: str) -> dict[str, float]:
    with ExitStack() as stack:
        server, service = stack.enter_context(RedisServer()), stack.enter_context(RedisServer())
        conf = settings(
            DQ.url(server.port),
            service.port,
            task_default_queue=QUEUE,
            dq_queues={QUEUE: {"concurrency": 1}},
            throttled_by=how,
            retry_after_s=RETRY_AFTER_S,
        )
        app = stack.enter_context(app_of("dq", conf))
        client: Any = stack.enter_context(redis.Redis(port=service.port))
        names = [f"t{number}" for number in range(TENANTS)]
        client.sadd("limited", *names[:THROTTLED])
        for number in range(WORKERS):
            stack.enter_context(worker_of("dq", conf, name=f"w{number}", pool="threads", concurrency=THREADS))
        began = time.monotonic()
        for number, name in enumerate(cycle(names)):
            due = began + number / RATE
            if due > began + seconds:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            app.tasks["call_service"].apply_async((name, time.time()), tenant=name)
        await_end(app, QUEUE)
        late, usual = (
            [float(each) for each in client.lrange(key, 0, -1)] for key in ("recovered", "latencies")
        )
        answers, early = (float(client.get(key) or 0) for key in ("answers", "early"))
        return {"answers": answers, "early": early, **quantiles_ms(late), "usual": quantiles_ms(usual)["p50"]}
