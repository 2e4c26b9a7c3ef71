"""Queues in ZooKeeper beside kombu's own transport for it, on one server in turn."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from kombu import Connection, Queue

from benchmarks.measure import Report, benchmark, interleave, percentile, spending
from celery_dq.curator.kinds import DistributedQueue
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer

STOCK, OURS = "kombu zookeeper://", "celery_dq.curator"
LOCKLESS = "… without locks"
CONTENDERS = (STOCK, OURS, LOCKLESS)
#: A body with the size of that of a small Celery task.
ITEM = {"filler": "x" * 80}


@benchmark(
    "queue | put/s | vs stock | put in batches/s | vs stock | consumed/s | vs stock | idle p50 ms | p99 ms"
    " | max ms",
    "{amount} messages of 100 bytes; kombu's transport has no batches and no locks",
)
def zookeeper_queues(report: Report, quick: bool) -> None:
    """Measure single puts, batches, consuming, and the time to reach an idle consumer."""
    amount = 500 if quick else 2000
    report.fill_in(amount=amount)
    with ZooKeeperServer(tick_ms=2000) as server:
        found = interleave(CONTENDERS, 2 if quick else 5, partial(_round, server.hosts, amount), 240)
    columns = "put | vs put | batch | vs batch | consume | vs consume | p50 | p99 | max"
    report.compare(found, STOCK, columns)


def _round(hosts: str, amount: int, name: str) -> dict[str, float]:
    chroot = f"{hosts}/bench-{time.monotonic_ns()}"
    return _stock(chroot, amount) if name == STOCK else _ours(chroot, amount, name == OURS)


def _stock(hosts: str, amount: int) -> dict[str, float]:
    with Connection(f"zookeeper://{hosts}") as producing, Connection(f"zookeeper://{hosts}") as consuming:
        queue = Queue("bench")(producing.default_channel)
        queue.declare()
        producer = producing.Producer()
        with spending() as putting:
            for _each in range(amount):
                producer.publish(ITEM, routing_key="bench", serializer="json")
        seen = 0
        waits: list[float] = []

        def receive(body: Any, message: Any) -> None:
            nonlocal seen
            seen += 1
            if "at" in body:
                waits.append(time.monotonic() - body["at"])
            message.ack()

        with consuming.Consumer([Queue("bench")], callbacks=[receive]) as consumer:
            consumer.qos(prefetch_count=100)
            with spending() as draining:
                while seen < amount:
                    consuming.drain_events(timeout=30)
            for _each in range(10):
                sender = threading.Timer(0.3, _send_stock, [hosts])
                sender.start()
                count = len(waits)
                while len(waits) == count:
                    consuming.drain_events(timeout=30)
                sender.join()
    put = amount / putting.wall_s
    return {"put": put, "batch": put, "consume": amount / draining.wall_s, **_waits(waits)}


def _send_stock(hosts: str) -> None:
    with Connection(f"zookeeper://{hosts}") as connection:
        connection.default_channel  # noqa: B018 - connects
        body = {**ITEM, "at": time.monotonic()}
        connection.Producer().publish(body, routing_key="bench", serializer="json")


def _ours(hosts: str, amount: int, locks: bool) -> dict[str, float]:
    options: dict[str, Any] = {"lock_path": "/locks" if locks else None, "prefetch": 100}
    seen = [0]
    waits: list[float] = []

    def receive(item: dict[str, Any]) -> None:
        seen[0] += 1
        if "at" in item:
            waits.append(time.monotonic() - item["at"])

    with DistributedQueue(hosts, "/queue") as producer:
        with spending() as putting:
            for _each in range(amount):
                producer.put(ITEM)
        with spending() as batching:
            producer.put_each([ITEM] * amount)
        started = time.perf_counter()
        with DistributedQueue(hosts, "/queue", consumer=receive, **options):
            wait_until(lambda: seen[0] == 2 * amount and producer.size() == 0, 120, interval_s=0.002)
            consume = 2 * amount / (time.perf_counter() - started)
            for _each in range(30):
                time.sleep(0.1)
                waits_before = len(waits)
                producer.put({**ITEM, "at": time.monotonic()})
                wait_until(partial(_grown, waits, waits_before), 30, interval_s=0.0005)
    rates = {"put": amount / putting.wall_s, "batch": amount / batching.wall_s, "consume": consume}
    return {**rates, **_waits(waits)}


def _grown(waits: list[float], before: int) -> bool:
    return len(waits) > before


def _waits(waits: list[float]) -> dict[str, float]:
    return {
        "p50": percentile(waits, 0.5) * 1e3,
        "p99": percentile(waits, 0.99) * 1e3,
        "max": max(waits) * 1e3,
    }
