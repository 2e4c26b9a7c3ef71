"""A Redis Cluster of three masters beside one server: publishes, claims, and the CPU time of each message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from kombu import Producer

from benchmarks.measure import Report, benchmark, interleave, spending
from benchmarks.postbox import QUEUE, Sink, publish_many, publish_one
from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer
from tests.brokers import BROKERS
from tests.workers import make_app

#: Broker and partitions of each contender. All are compared with the first one.
CONTENDERS = {"1 server, 1": ("dq", 1), "1 server, 12": ("dq", 12), "3 masters, 12": ("cluster", 12)}
TENANTS = 1_000
#: Columns by their quantity: of one publish at a time, of batches, of claims with their acks.
RATES = {"single": "publish/s", "batch": "batched/s", "claim": "claim+ack/s"}


@benchmark(
    "servers, partitions | "
    + "".join(f"{title} | vs first | client µs | redis µs | " for title in RATES.values())
    + "redis µs, busiest",
    f"""
    kombu level, one process, messages of {TENANTS:,} tenants; batches of 1,000, prefetch 100
    µs of CPU for each message: of the process, and of all masters together
    redis µs, busiest: of the claims, on the master with most of it: the bound with more cores
    the cluster runs without its replicas, which would share the two cores
    """,
)
def cluster(report: Report, quick: bool) -> None:
    """Measure publishes and claims of one process on a cluster and on one server, in turns."""
    singles, messages = (300, 2_000) if quick else (3_000, 24_000)
    found = interleave(list(CONTENDERS), 1 if quick else 5, partial(_round, singles, messages), 300)
    columns = "".join(f"{rate} | vs {rate} | {rate} client | {rate} redis | " for rate in RATES)
    report.compare(found, next(iter(found)), f"{columns}claim busiest")


def _round(singles: int, messages: int, contender: str) -> dict[str, float]:
    broker, partitions = CONTENDERS[contender]
    with ExitStack() as stack:
        url, ports = stack.enter_context(servers(broker))
        conf = {"broker_url": url, "dq_queues": {QUEUE: {"partitions": partitions}}}
        app: Any = stack.enter_context(make_app("bench", BROKERS[broker], conf))
        connection = stack.enter_context(app.connection_for_write())
        publish_many(connection, ["first"])  # loads the scripts, and declares the queue
        sink = stack.enter_context(Sink(connection))
        sink.drain(1, 10)
        producer = Producer(connection.channel())
        names = [f"t{number % TENANTS}" for number in range(messages)]

        def publish_singly() -> None:
            for number in range(singles):
                publish_one(producer, names[number])

        figures = _measure("single", publish_singly, singles, ports)
        figures |= _measure("batch", partial(publish_many, connection, names), messages, ports)
        total = singles + messages
        figures |= _measure("claim", partial(sink.drain, total + 1, 120), total, ports)
        if len(sink.arrivals) != total + 1:
            raise TimeoutError(f"{len(sink.arrivals):,} of {total + 1:,} messages came")
    return figures


def _measure(name: str, run: Callable[[], object], amount: int, ports: list[int]) -> dict[str, float]:
    """Return rate and CPU time for each of these messages."""
    with spending(*ports) as spent:
        run()
    each = spent.per(amount)
    return {
        name: each["rate"],
        f"{name} client": each["own"],
        f"{name} redis": each["cpu"],
        f"{name} busiest": max(spent.redis_s) / amount * 1e6,
    }


@contextmanager
def servers(broker: str) -> Iterator[tuple[str, list[int]]]:
    """Run the servers of a broker; yield its URL and the ports of the masters."""
    if broker != "cluster":
        with RedisServer() as server:
            yield BROKERS[broker].url(server.port), [server.port]
        return
    # The killed replicas must not cost a failover, nor a busy machine.
    with RedisCluster(node_timeout_ms=60_000) as nodes:
        masters = nodes.masters()
        for node in nodes.nodes:
            if node not in masters:
                nodes.kill(node)
        yield nodes.url(), [master.port for master in masters]
