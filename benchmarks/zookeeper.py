"""Queues in ZooKeeper, and ZooKeeper as a broker, beside kombu's own ``zookeeper://``.

The contenders run on one ZooKeeper, in turn; brokers at the level of kombu, because the cost of Celery is the
same for both.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import Any

from kombu import Connection, Queue

from benchmarks.measure import Report, benchmark, interleave, quantiles_ms, spending
from benchmarks.postbox import Sink, producer_of, publish_many, publish_one
from celery_dq.curator.queue import DistributedQueue
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.wiring import register_transports

STOCK, OURS = "kombu zookeeper://", "celery_dq.curator"
LOCKLESS = "… without locks"
QUEUES = (STOCK, OURS, LOCKLESS)
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
        found = interleave(QUEUES, 2 if quick else 5, partial(_run_queue, server.hosts, amount), 240)
    columns = "put | vs put | batch | vs batch | consume | vs consume | p50 | p99 | max"
    report.compare(found, STOCK, columns)


def _run_queue(hosts: str, amount: int, name: str) -> dict[str, float]:
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
    return {"put": put, "batch": put, "consume": amount / draining.wall_s, **quantiles_ms(waits)}


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
            for number in range(30):
                time.sleep(0.1)
                producer.put({**ITEM, "at": time.monotonic()})
                wait_until(lambda number=number: len(waits) > number, 30, interval_s=0.0005)  # type: ignore[misc]
    rates = {"put": amount / putting.wall_s, "batch": amount / batching.wall_s, "consume": consume}
    return {**rates, **quantiles_ms(waits)}


TRANSPORTS = ("zookeeper", "dq-zookeeper")


@benchmark(
    "transport | publish 1 by 1/s | vs kombu | in batches/s | vs kombu | consume/s | vs kombu | idle p50 ms"
    " | idle max ms",
    """
    kombu's has no batches: its figure there is publishing one by one
    idle: one message at a time after a pause of 50 to 250 ms, from publish to callback
    """,
)
def zookeeper_broker(report: Report, quick: bool) -> None:
    """Measure messages/s, published singly, in batches, and consumed; and ms from publish to consumer."""
    with ZooKeeperServer(tick_ms=2000) as server:
        once = partial(_run_broker, server, 200 if quick else 1_000, 20 if quick else 60)
        found = interleave(TRANSPORTS, 2 if quick else 5, once, 240)
    columns = "single | vs single | batch | vs batch | consume | vs consume | p50 | max"
    report.compare(found, "zookeeper", columns)


def _connect(server: ZooKeeperServer, scheme: str) -> Connection:
    register_transports()
    if scheme == "zookeeper":
        # kombu's transport never closes its session and accepts no chroot, so its queues have their own
        # folder.
        return Connection(f"zookeeper://{server.hosts}/stock")
    return Connection(f"dq-zookeeper://{server.hosts}/dq")


def _run_broker(server: ZooKeeperServer, amount: int, pings: int, scheme: str) -> dict[str, float]:
    queue = f"bench-{random.randrange(10**9)}"
    batches = scheme != "zookeeper"
    with _connect(server, scheme) as connection:
        producer = producer_of(connection, queue)
        with spending() as single:
            for _ in range(amount):
                publish_one(producer, "", queue)
        with spending() as batch:
            if batches:
                publish_many(connection, [""] * amount, queue)
        with Sink(connection, prefetch=100, queue=queue) as sink, spending() as draining:
            sink.drain(amount * (1 + batches), 120)
    idle = _idle(server, scheme, f"{queue}-idle", pings)
    return {
        "single": amount / single.wall_s,
        "batch": amount / (batch if batches else single).wall_s,
        "consume": len(sink.arrivals) / draining.wall_s,
        **quantiles_ms(idle),
    }


def _idle(server: ZooKeeperServer, scheme: str, queue: str, pings: int) -> list[float]:
    over = threading.Event()
    with _connect(server, scheme) as consuming, _connect(server, scheme) as publishing:
        producer = producer_of(publishing, queue)
        with Sink(consuming, prefetch=1, queue=queue) as sink:

            def consume() -> None:
                while not over.is_set():
                    sink.drain(len(sink.arrivals) + 1, 0.5)

            thread = threading.Thread(target=consume)
            thread.start()
            try:
                for number in range(pings):
                    time.sleep(random.uniform(0.05, 0.25))
                    publish_one(producer, "", queue)
                    while len(sink.arrivals) <= number:
                        time.sleep(0.001)
            finally:
                over.set()
                thread.join()
    return [arrived - sent for arrived, _, sent in sink.arrivals]
