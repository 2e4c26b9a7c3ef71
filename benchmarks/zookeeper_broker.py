"""``dq-zookeeper://`` beside kombu's own ``zookeeper://``: publishing, consuming, idle latency.

Both run on one ZooKeeper, in turn, at the level of kombu, because the cost of Celery is the same for both.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial

from kombu import Connection

from benchmarks.measure import Report, benchmark, interleave, percentile, spending
from benchmarks.postbox import Sink, producer_of, publish_many, publish_one
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.wiring import register_transports

CONTENDERS = ("zookeeper", "dq-zookeeper")


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
        once = partial(_round, server, 200 if quick else 1_000, 20 if quick else 60)
        found = interleave(CONTENDERS, 2 if quick else 5, once, 240)
    columns = "single | vs single | batch | vs batch | consume | vs consume | p50 | max"
    report.compare(found, "zookeeper", columns)


def _connect(server: ZooKeeperServer, scheme: str) -> Connection:
    register_transports()
    if scheme == "zookeeper":
        # kombu's transport never closes its session and accepts no chroot, so its queues have their own
        # folder.
        return Connection(f"zookeeper://{server.hosts}/stock")
    return Connection(f"dq-zookeeper://{server.hosts}/dq")


def _round(server: ZooKeeperServer, amount: int, pings: int, scheme: str) -> dict[str, float]:
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
        "p50": percentile(idle, 0.5),
        "max": max(idle),
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
    return [(arrived - sent) * 1000 for arrived, _, sent in sink.arrivals]
