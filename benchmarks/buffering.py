"""The buffered producer beside stock: calls per second, latency of a call, outages, the disk, processes."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import pools

import celery_dq
from benchmarks.measure import Report, Series, dump, interleave, percentile, ratio, short
from celery_dq.app.api.api import dq_of
from celery_dq.producer.buffer import Limits
from celery_dq.producer.buffered_producer import BufferedProducer, Persistence
from celery_dq.producer.sender import Addressed
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until

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


def buffering(quick: bool) -> Report:
    """Measure ``apply_async`` from one thread until the broker has all messages, and each single call."""
    report = Report("buffering")
    report.header = ["way", "to the broker/s", "vs stock", "calls/s", "cpu µs/msg", "p50 µs", "p99 µs"]
    report.notes.append("closed loop, one thread; write-ahead on; vs stock is of messages in the broker")
    found = interleave(WAYS, 3 if quick else 7, partial(_closed, 2_000 if quick else 20_000), 150)
    for way in WAYS:
        row = found[way]
        against = ratio(row["rate"], found["stock"]["rate"])
        report.row(way, row["rate"], against, row["calls"], row["cpu"], row["p50"], row["p99"])
    report.data = dump(found)
    return report


def _closed(amount: int, way: str) -> dict[str, float]:
    amount = amount if way == "buffered" else max(amount // 20, 500)
    with RedisServer() as server, shop(way, server) as task:
        cpu, started = time.process_time(), time.perf_counter()
        for _ in range(amount):
            task.apply_async((42, "A-1"))
        called = time.perf_counter()
        flush(task.app)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        waits = []
        for _ in range(amount // 2):
            before = time.perf_counter()
            task.apply_async((42, "A-1"))
            waits.append((time.perf_counter() - before) * 1e6)
        flush(task.app)
    return {
        "rate": amount / (ended - started),
        "calls": amount / (called - started),
        "cpu": cpu / amount * 1e6,
        "p50": percentile(waits, 0.5),
        "p99": percentile(waits, 0.99),
    }


def pacing(quick: bool) -> Report:
    """Measure the latency of 1,000 calls per second from one thread, and the delay of another thread."""
    report = Report("pacing")
    report.header = ["way", "p50 µs", "p99 µs", "max ms", "other thread late, p99 ms"]
    report.notes.append(
        "at 1,000 a second; another thread wakes every 2 ms and measures by how much too late"
    )
    found = interleave(WAYS, 2 if quick else 5, partial(_paced, 2.0 if quick else 8.0), 150)
    for way in WAYS:
        row = found[way]
        report.row(way, row["p50"], row["p99"], row["max"], row["late"])
    report.data = dump(found)
    return report


class Sleeper(threading.Thread):
    """Wakes every 2 ms and records its delay in ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late: list[float] = []
        self.over = False

    def run(self) -> None:
        while not self.over:
            due = time.perf_counter() + 0.002
            time.sleep(0.002)
            self.late.append((time.perf_counter() - due) * 1e3)


def _pace(task: Any, seconds: float) -> list[float]:
    """Make 1,000 calls per second; return the µs of each call."""
    waits = []
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        due += 0.001
        pause = due - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        before = time.perf_counter()
        task.apply_async((42, "A-1"))
        waits.append((time.perf_counter() - before) * 1e6)
    return waits


def _paced(seconds: float, way: str) -> dict[str, float]:
    with RedisServer() as server, shop(way, server) as task:
        sleeper = Sleeper()
        sleeper.start()
        waits = _pace(task, seconds)
        sleeper.over = True
        sleeper.join()
        flush(task.app)
    return {
        "p50": percentile(waits, 0.5),
        "p99": percentile(waits, 0.99),
        "max": max(waits) / 1e3,
        "late": percentile(sleeper.late, 0.99),
    }


def outage(quick: bool) -> Report:
    """Kill or pause the broker under 1,000 calls per second, and start it again."""
    report = Report("outage")
    seconds = 5.0 if quick else 60.0
    report.header = [
        "broker",
        "calls",
        "p50 µs",
        "p99 µs",
        "max ms",
        "in memory",
        "on disk MB",
        "drained in s",
    ]
    report.notes.append(f"{seconds:.0f} s at 1,000 a second; memory is limited to 20,000 messages")
    for kind in ("killed", "stopped"):
        with RedisServer(appendonly=True, config={"appendfsync": "everysec"}) as server:
            conf = {"dq_buffer_max_messages": 20_000, "broker_transport_options": {"socket_timeout": 2.0}}
            with shop("buffered", server, **conf) as task:
                (server.kill if kind == "killed" else server.pause)()
                waits = _pace(task, seconds)
                seen = task.app.dq.buffer.inspect()
                (server.start if kind == "killed" else server.resume)()
                started = time.perf_counter()
                flush(task.app)
                drained = time.perf_counter() - started
        figures = {
            "p50": percentile(waits, 0.5),
            "p99": percentile(waits, 0.99),
            "max": max(waits) / 1e3,
            "memory": float(seen.in_memory),
            "disk": seen.spill_bytes / 1e6,
            "drain": drained,
        }
        report.row(kind, f"{len(waits):,}", *map(short, figures.values()))
        report.data[kind] = figures
    return report


class Nowhere:
    """A sender that delivers at once, so that only the spill log is measured."""

    def address(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> Addressed:
        return Addressed(routing_key, b"0" * 36, str(message["body"]).encode())

    def send(self, lane: str, producer: str, messages: Any) -> None: ...

    def close(self) -> None: ...


def committing(quick: bool) -> Report:
    """Measure calls that wait for the disk (``dq_buffer_sync_every = 1``) and share its syncs."""
    report = Report("committing")
    report.header = ["callers", "on disk/s", "p50 ms", "p99 ms"]
    seconds = 1.0 if quick else 4.0
    for callers in (1, 4, 16, 64):
        with tempfile.TemporaryDirectory(dir=HERE) as folder:
            producer = BufferedProducer(Nowhere, persistence=Persistence(Path(folder), sync_every=1))
            waits: list[float] = []
            threads = [
                threading.Thread(target=_commit, args=(producer, seconds, waits)) for _ in range(callers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            producer.close(5)
        figures = {
            "rate": len(waits) / seconds,
            "p50": percentile(waits, 0.5),
            "p99": percentile(waits, 0.99),
        }
        report.row(callers, *(f"{value:,.3g}" for value in figures.values()))
        report.data[str(callers)] = figures
    return report


def _commit(producer: BufferedProducer, seconds: float, waits: list[float]) -> None:
    message = Addressed("lane", b"0" * 36, b"x" * 350)
    end = time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        producer.put(message)
        waits.append((time.perf_counter() - before) * 1e3)


def sharing(quick: bool) -> Report:
    """Measure four processes that put messages into one folder as fast as possible, beside one process."""
    report = Report("sharing")
    report.header = ["processes", "puts/s in all", "each"]
    seconds = 1.0 if quick else 4.0
    rates: dict[int, Series] = {1: Series(), 4: Series()}
    for _ in range(2 if quick else 4):
        for processes, series in rates.items():
            with tempfile.TemporaryDirectory(dir=HERE) as folder:
                series.values.append(_share(Path(folder), processes, seconds))
    for processes, series in rates.items():
        report.row(processes, series, f"{series.median / processes:,.0f}")
    report.data = {str(processes): series.values for processes, series in rates.items()}
    report.notes.append("the sender takes everything at once; put, write-ahead and removal are measured")
    return report


def _share(folder: Path, processes: int, seconds: float) -> float:
    counts = folder / "counts"
    counts.mkdir()
    children = []
    for number in range(processes):
        pid = os.fork()
        if pid == 0:
            try:
                _put_for(folder / "spill", seconds, counts / str(number))
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return sum(int(path.read_text()) for path in counts.iterdir()) / seconds


def _put_for(folder: Path, seconds: float, result: Path) -> None:
    persistence = Persistence(folder)
    producer = BufferedProducer(Nowhere, limits=Limits(), persistence=persistence, max_block_s=5)
    message = Addressed("lane", b"0" * 36, b"x" * 350)
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        producer.put(message)
        count += 1
    result.write_text(str(count))
    wait_until(lambda: producer.flush(1) == 0, 30)
    producer.close(5)
