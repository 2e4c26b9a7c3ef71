"""``dq-zookeeper://`` beside kombu's own ``zookeeper://``: publishing, consuming, idle latency, big queues.

Both run on one ZooKeeper, in turn, at the level of kombu, because the cost of Celery is the same for both.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from functools import partial

from kombu import Connection, Producer, Queue

from benchmarks.measure import Report, dump, interleave, percentile, ratio
from benchmarks.postbox import FILLER, Sink, publish_many
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.wiring import register_transports

CONTENDERS = ("zookeeper", "dq-zookeeper")


def zookeeper_broker(quick: bool) -> Report:
    """Measure messages/s, published singly, in batches, and consumed; and ms from publish to consumer."""
    report = Report("zookeeper-broker")
    report.header = [
        "transport",
        "publish 1 by 1/s",
        "vs kombu",
        "in batches/s",
        "vs kombu",
        "consume/s",
        "vs kombu",
        "idle p50 ms",
        "idle max ms",
    ]
    report.notes += [
        "kombu's has no batches: its figure there is publishing one by one",
        "idle: one message at a time after a pause of 50 to 250 ms, from publish to callback",
    ]
    with ZooKeeperServer(tick_ms=2000) as server:
        once = partial(_round, server, 200 if quick else 1_000, 20 if quick else 60)
        found = interleave(CONTENDERS, 2 if quick else 5, once, 240)
    kombu = found["zookeeper"]
    for name in CONTENDERS:
        row = found[name]
        against = [ratio(row[key], kombu[key]) for key in ("single", "batch", "consume")]
        report.row(
            name,
            row["single"],
            against[0],
            row["batch"],
            against[1],
            row["consume"],
            against[2],
            row["idle p50"],
            row["idle max"],
        )
    report.data = dump(found)
    return report


def _connect(server: ZooKeeperServer, scheme: str) -> Connection:
    register_transports()
    if scheme == "zookeeper":
        # kombu's transport never closes its session and accepts no chroot, so its queues have their own
        # folder.
        return Connection(f"zookeeper://{server.hosts}/stock")
    return Connection(f"dq-zookeeper://{server.hosts}/dq")


def _round(server: ZooKeeperServer, amount: int, pings: int, scheme: str) -> dict[str, float]:
    queue = f"bench-{random.randrange(10**9)}"
    with _connect(server, scheme) as connection:
        channel = connection.channel()
        producer = Producer(channel)
        Queue(queue)(channel).declare()
        started = time.perf_counter()
        for _ in range(amount):
            producer.publish(_body(), routing_key=queue, serializer="json")
        single = amount / (time.perf_counter() - started)
        batch = single
        if scheme != "zookeeper":
            started = time.perf_counter()
            publish_many(connection, [""] * amount, queue)
            batch = amount / (time.perf_counter() - started)
        there = amount if scheme == "zookeeper" else 2 * amount
        sink = Sink(connection, prefetch=100, queue=queue)
        started = time.perf_counter()
        sink.drain(there, 120)
        consume = len(sink.arrivals) / (time.perf_counter() - started)
        sink.close()
    idle = _idle(server, scheme, f"{queue}-idle", pings)
    return {
        "single": single,
        "batch": batch,
        "consume": consume,
        "idle p50": percentile(idle, 0.5),
        "idle max": max(idle),
    }


def _body() -> dict[str, object]:
    return {"tenant": "", "at": time.monotonic(), "filler": FILLER}


def _idle(server: ZooKeeperServer, scheme: str, queue: str, pings: int) -> list[float]:
    over = threading.Event()
    with _connect(server, scheme) as consuming, _connect(server, scheme) as publishing:
        channel = publishing.channel()
        producer = Producer(channel)
        Queue(queue)(channel).declare()
        sink = Sink(consuming, prefetch=1, queue=queue)

        def consume() -> None:
            while not over.is_set():
                with suppress(TimeoutError):
                    consuming.drain_events(timeout=0.5)

        thread = threading.Thread(target=consume)
        thread.start()
        try:
            for number in range(pings):
                time.sleep(random.uniform(0.05, 0.25))
                producer.publish(_body(), routing_key=queue, serializer="json")
                while len(sink.arrivals) <= number:
                    time.sleep(0.001)
        finally:
            over.set()
            thread.join()
        sink.close()
    return [(arrived - sent) * 1000 for arrived, _, sent in sink.arrivals]
