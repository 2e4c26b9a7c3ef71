"""Claim and acknowledge at kombu level, over the number of tenants."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from functools import partial

from benchmarks.measure import (
    Report,
    Series,
    ServerProbe,
    benchmark,
    chosen,
    interleave,
    quantiles_ms,
    spending,
    steadily,
)
from benchmarks.postbox import Sink, connect, producer_of, publish_batch, publish_many, warm_up
from benchmarks.quotas import idle_bytes, quota_error
from benchmarks.summary import curve
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE

POINTS = (1, 10, 100, 1_000, 10_000, 60_000, 100_000)
QUICK_POINTS = (1, 10, 100, 1_000)
#: Messages/s at which the dwell is measured: about a quarter of the rate of the stock transport.
DWELL_RATE = 300


@benchmark(
    "tenants | broker | claimed+acked/s | vs stock | redis µs/msg | bytes/msg | bytes/idle tenant"
    " | dwell p50 ms | dwell p99 ms | quota error %",
    f"""
    backlog preloaded, one consumer, prefetch 100, an ack for each message
    redis µs: used_cpu_user + used_cpu_sys; bytes: used_memory; dwell: at {DWELL_RATE}/s on both
    bytes/idle tenant: MEMORY USAGE of all keys, once the messages are gone and the tokens are back
    stock knows no tenants: its figure is that of one queue with the same messages
    quota error: at the claim, the worst of up to 100 tenants with 2,000/s in all; all others must wait
    """,
)
def claims(report: Report, quick: bool, only: str = "") -> None:
    """Messages/s, Redis CPU and memory per message with a backlog; dwell without one."""
    cases = {f"{point:,} tenant{'s' * (point > 1)}": point for point in (QUICK_POINTS if quick else POINTS)}
    for case in chosen(list(cases), only):
        tenants = cases[case]
        messages = max(tenants, 1_500 if quick else 20_000)
        once = partial(_round, tenants, messages, 1.0 if quick else 4.0)
        found = interleave(ACTIVE, 1 if quick else 3, once, 60)
        found["dq"]["quota"] = Series([quota_error(tenants, 2.0 if quick else 10.0)])
        found["dq"]["idle"] = Series([idle_bytes(tenants)])
        report.compare(found, "stock", "rate | vs rate | cpu | memory | idle | p50 | p99 | quota", tenants)
    if beside := curve(report.data):
        report.notes.append(beside)


def _round(tenants: int, messages: int, seconds: float, broker: str) -> dict[str, float]:
    names = [f"t{number % tenants}" for number in range(messages)]
    random.Random(tenants).shuffle(names)
    with RedisServer() as server, closing(ServerProbe(server.port)) as probe:
        with connect(broker, server.port) as connection:
            warm_up(connection)
            empty = probe.bytes_used()
            publish_many(connection, names)
            full = probe.bytes_used()
            with Sink(connection) as sink:
                with spending(server.port) as spent:
                    sink.drain(messages, max(10.0, seconds * 5))
                got = len(sink.arrivals)
                # The whole backlog, because a rest would delay the messages of the dwell below.
                sink.drain(messages, 120)
        dwell = _dwell(broker, server.port, tenants, DWELL_RATE, seconds)
    return {**spent.per(max(1, got)), "memory": (full - empty) / messages, **quantiles_ms(dwell)}


def _dwell(broker: str, port: int, tenants: int, rate: int, seconds: float) -> list[float]:
    """Seconds from publish to arrival, while a thread publishes at `rate` to random tenants."""
    draw = random.Random(tenants)

    def publish() -> None:
        with connect(broker, port) as own:
            producer = producer_of(own)
            # Small batches, because one publish call per message would measure the publisher.
            for _ in steadily(100, seconds):
                publish_batch(producer, [f"t{draw.randrange(tenants)}" for _ in range(rate // 100)])

    with connect(broker, port) as connection, Sink(connection) as sink:
        thread = threading.Thread(target=publish)
        thread.start()
        sink.drain(10**9, seconds)
        thread.join()
    return [arrived - published for arrived, _, published in sink.arrivals]
