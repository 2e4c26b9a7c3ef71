"""The buffered producer beside stock: calls per second, latency of a call, outages."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import pools

import celery_dq
from benchmarks.measure import Report, benchmark, interleave, percentile, short, spending, steadily
from celery_dq.app.api.api import dq_of
from celery_dq.testing.servers import RedisServer

WAYS = ("stock", "dq", "buffered")
HERE = Path(__file__).resolve().parent / "out"


@contextmanager
def shop(way: str, server: RedisServer, **conf: Any) -> Iterator[Any]:
    """A task of an app that publishes in one of the ways."""
    HERE.mkdir(exist_ok=True)
    # Not in /tmp, but on the disk of a real spill log.
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        app = Celery("shop", broker=server.url(scheme="redis" if way == "stock" else "dq-redis"))
        app.conf.task_routes = {"notify": "push"}
        app.conf.update(conf)
        if way != "stock":
            app.conf.update(dq_buffer=way == "buffered", dq_buffer_folder=folder)
            celery_dq.setup(app)

        def notify(merchant: int, order: str) -> None: ...

        task: Any = app.task(name="notify", shared=False)(notify)
        for _ in range(20):
            task.delay(1, "A-1")
        flush(app)
        yield task
        if way != "stock":
            dq_of(app).buffer.close(5)
        app.close()
        pools.reset()


def flush(app: Any) -> None:
    if hasattr(app, "dq") and app.dq.buffer.flush(120):
        raise TimeoutError("the buffer was not flushed within 120 s")


@benchmark(
    "way | to the broker/s | vs stock | calls/s | cpu µs/msg | p50 µs | p99 µs",
    "closed loop, one thread; write-ahead on; vs stock is of messages in the broker",
)
def buffering(report: Report, quick: bool) -> None:
    """Measure ``apply_async`` from one thread until the broker has all messages, and each single call."""
    found = interleave(WAYS, 3 if quick else 7, partial(_closed, 2_000 if quick else 20_000), 150)
    report.compare(found, "stock", "rate | vs rate | calls | own | p50 | p99")


def _closed(amount: int, way: str) -> dict[str, float]:
    amount = amount if way == "buffered" else max(amount // 20, 500)
    with RedisServer() as server, shop(way, server) as task:
        with spending() as spent:
            started = time.perf_counter()
            for _ in range(amount):
                task.apply_async((42, "A-1"))
            called_s = time.perf_counter() - started
            flush(task.app)
        waits = [_call(task) for _ in range(amount // 2)]
        flush(task.app)
    return {
        **spent.per(amount),
        "calls": amount / called_s,
        "p50": percentile(waits, 0.5),
        "p99": percentile(waits, 0.99),
    }


def _call(task: Any) -> float:
    """Call the task; return the µs of the call."""
    before = time.perf_counter()
    task.apply_async((42, "A-1"))
    return (time.perf_counter() - before) * 1e6


@benchmark(
    "broker | calls | p50 µs | p99 µs | max ms | in memory | on disk MB | drained in s",
    "{seconds:.0f} s at 1,000 a second; memory is limited to 20,000 messages",
)
def outage(report: Report, quick: bool) -> None:
    """Kill or pause the broker under 1,000 calls per second, and start it again."""
    seconds = 5.0 if quick else 60.0
    report.fill_in(seconds=seconds)
    for kind in ("killed", "stopped"):
        with RedisServer(appendonly=True, config={"appendfsync": "everysec"}) as server:
            conf = {"dq_buffer_max_messages": 20_000, "broker_transport_options": {"socket_timeout": 2.0}}
            with shop("buffered", server, **conf) as task:
                (server.kill if kind == "killed" else server.pause)()
                waits = [_call(task) for _ in steadily(1_000, seconds)]
                seen = task.app.dq.buffer.inspect()
                (server.start if kind == "killed" else server.resume)()
                with spending() as draining:
                    flush(task.app)
        figures = {
            "p50": percentile(waits, 0.5),
            "p99": percentile(waits, 0.99),
            "max": max(waits) / 1e3,
            "memory": float(seen.in_memory),
            "disk": seen.spill_bytes / 1e6,
            "drain": draining.wall_s,
        }
        report.row(kind, f"{len(waits):,}", *map(short, figures.values()))
        report.data[kind] = figures
