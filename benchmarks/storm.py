"""A cache-refresh storm: many calls for few entries, and each refresh takes some time.

Keys are Gaussian, as in the document that describes the dedup state machine. *Staleness* is the time from a
call to the start of the first run of its key that began after the call.
"""

from __future__ import annotations

import bisect
import random
import threading
import time
from collections import defaultdict
from functools import partial
from typing import Any

from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import pools

import celery_dq
from benchmarks.measure import Report, dump, interleave, percentile, ratio
from celery_dq.app.api.api import dq_of
from celery_dq.dedup import dedup
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until

SKUS, SECONDS_A_RUN, CONCURRENCY = 20, 0.1, 8
RATE = 1_000  # calls per second, when the machine is fast enough


def storm(quick: bool) -> Report:
    """Measure work and staleness in a storm, with and without dedup."""
    report = Report("storm")
    report.header = [
        "",
        "calls",
        "runs",
        "work saved",
        "stale ms p50",
        "stale ms p99",
        "done after s",
        "vs none",
    ]
    found = interleave(["none", "dedup"], 2 if quick else 5, partial(_storm, 1_000 if quick else 4_000), 180)
    for name, row in found.items():
        report.row(
            name,
            row["calls"],
            row["runs"],
            row["saved"],
            row["p50"],
            row["p99"],
            row["done"],
            ratio(row["done"], found["none"]["done"]),
        )
    report.notes.append(
        f"{SKUS} keys, Gaussian; {SECONDS_A_RUN * 1000:.0f} ms a run, {CONCURRENCY} at a time; at most "
        f"{RATE} calls a second"
    )
    report.data = dump(found)
    return report


def _storm(amount: int, kind: str) -> dict[str, float]:
    chance = random.Random(5)
    starts: dict[int, list[float]] = defaultdict(list)
    lock = threading.Lock()
    with RedisServer() as server:
        app = Celery("storm", broker=server.url(1, scheme="dq-redis"), set_as_current=False)
        app.conf.update(task_ignore_result=True, task_default_queue="cache", worker_hijack_root_logger=False)
        celery_dq.setup(app)

        def refresh(sku: int) -> None:
            with lock:
                starts[sku].append(time.monotonic())
            time.sleep(SECONDS_A_RUN)

        task: Any = app.task(name="refresh", shared=False)(dedup(key="{sku}")(refresh))
        calls: list[tuple[int, float]] = []
        with start_worker(
            app, pool="threads", concurrency=CONCURRENCY, perform_ping_check=False, loglevel="ERROR"
        ):
            began = time.monotonic()
            for number in range(amount):
                sku = min(int(abs(chance.gauss(0, SKUS / 4))), SKUS - 1)
                calls.append((sku, time.monotonic()))
                task.apply_async((sku,), dedup=None if kind == "dedup" else False)
                ahead = began + number / RATE - time.monotonic()
                if ahead > 0:
                    time.sleep(ahead)
            wait_until(lambda: dq_of(app).queues["cache"].snapshot().waiting == 0, 120, interval_s=0.05)
            wait_until(lambda: all(starts[sku][-1] > at for sku, at in calls), 30)
            done = time.monotonic() - began
        app.close()
        pools.reset()
    stale = [starts[sku][bisect.bisect_right(starts[sku], at)] - at for sku, at in calls]
    runs = sum(map(len, starts.values()))
    return {
        "calls": amount,
        "runs": runs,
        "saved": 1 - runs / amount,
        "p50": percentile(stale, 0.5) * 1e3,
        "p99": percentile(stale, 0.99) * 1e3,
        "done": done,
    }
