"""Quotas and fairness at kombu level: does a tenant get its rate, and does it harm others?

The stock transport has neither, so there is nothing to compare with but the promise.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain, repeat
from typing import Any

from celery import Celery

from benchmarks.measure import Report, jain, percentile, short
from benchmarks.postbox import QUEUE, ConsumerProcess, Sink, connect, publish_many
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS, Broker
from tests.workers import make_app

CONSUMERS = 4


def _leased() -> list[Broker]:
    return [BROKERS[name] for name in ACTIVE if BROKERS[name].has_leases]


def _app(broker: Broker, server: RedisServer) -> Celery:
    return make_app("bench", broker, {"broker_url": broker.url(server.port), "task_default_queue": QUEUE})


def rates_of(tenants: int, total: float) -> dict[str, float]:
    """Rates from 1/s to total/10 in a geometric row, scaled so that they add up to `total`."""
    top = total / 10
    row = [top ** (index / (tenants - 1)) for index in range(tenants)]
    # The ends stay; those between share what is left.
    scale = (total - row[0] - row[-1]) / sum(row[1:-1])
    return {
        f"t{index}": rate if index in (0, tenants - 1) else max(1.0, rate * scale)
        for index, rate in enumerate(row)
    }


def worst_excess(arrivals: list[float], rate: float, burst: float) -> float:
    """The most messages that any window held beyond rate x window + burst; negative when all kept below."""
    worst, lowest = -math.inf, math.inf
    for index, moment in enumerate(sorted(arrivals)):
        lowest = min(lowest, index - rate * moment)
        worst = max(worst, (index + 1 - rate * moment) - lowest - burst)
    return worst


def quotas(quick: bool) -> Report:
    """Each tenant's error over the time, the worst window, and how fast a change acts on a big backlog."""
    report = Report("quotas")
    report.header = ["broker", "what", "figure", "promise"]
    report.notes.append("arrivals at the consumers' clocks: delivery in batches shows as a little excess")
    seconds, total, tenants = (10.0, 1_000.0, 20) if quick else (60.0, 5_000.0, 100)
    for broker in _leased():
        found = _steady(broker, rates_of(tenants, total), seconds)
        report.row(broker.name, f"tenants beyond max(1 %, 1 message) over {seconds:g} s", found["beyond"], 0)
        report.row(broker.name, "worst error, messages", short(found["worst"]), "max(1 %, 1)")
        report.row(broker.name, "worst window beyond rate x window + burst", short(found["excess"]), "<= 0")
        backlog = 6_000 if quick else 60_000
        change = _change(broker, backlog)
        report.row(
            broker.name, f"a change on {backlog:,} tenants' backlog acts within, s", short(change), "<= 1"
        )
        report.data[broker.name] = {**found, "change": change}
    if not report.rows:
        report.notes.append("no active broker has quotas")
    return report


def _steady(broker: Broker, rates: dict[str, float], seconds: float) -> dict[str, Any]:
    warm_up = 3.0
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        app: Any = _app(broker, server)
        stack.callback(app.close)
        bursts = {tenant: max(2, math.ceil(rate * 0.1)) for tenant, rate in rates.items()}
        for tenant, rate in rates.items():
            app.dq.quotas.set(QUEUE, tenant, rate=rate, burst=bursts[tenant])
        connection = stack.enter_context(connect(broker.name, server.port))
        # Interleaved, so that preloading needs no memory of its own.
        backlog = ((t, math.ceil(rate * (seconds + warm_up + 2)) + bursts[t]) for t, rate in rates.items())
        publish_many(connection, chain.from_iterable(repeat(tenant, amount) for tenant, amount in backlog))
        consumers = [
            ConsumerProcess(broker.name, server.port, seconds + warm_up + 1) for _ in range(CONSUMERS)
        ]
        for consumer in consumers:
            stack.callback(consumer.stop)
        for consumer in consumers:
            consumer.wait_ready()
        begin = time.monotonic() + warm_up
        rows = [row for consumer in consumers for row in consumer.arrivals(seconds + 60)]
    end = begin + seconds
    times: dict[str, list[float]] = defaultdict(list)
    for arrived, tenant, _ in rows:
        times[tenant].append(arrived)
    errors = {t: sum(begin <= at < end for at in times[t]) - rate * seconds for t, rate in rates.items()}
    excess = max(worst_excess(times[tenant], rate, bursts[tenant]) for tenant, rate in rates.items())
    beyond = [t for t, error in errors.items() if abs(error) > max(0.01 * rates[t] * seconds, 1)]
    worst = max(errors.values(), key=abs)
    return {"beyond": len(beyond), "worst": worst, "excess": excess, "errors": errors, "rates": rates}


def quota_error(broker: Broker, tenants: int, seconds: float) -> float:
    """The worst error, in % of what its rate allows, of some tenants beside many that wait for a token."""
    active = min(tenants, 100)
    rate, warm_up = 2_000 / active, 1.0
    with RedisServer() as server, connect(broker.name, server.port) as connection:
        app: Any = _app(broker, server)
        app.dq.quotas.set_default(QUEUE, rate="1/h", burst=1)
        for number in range(active):
            app.dq.quotas.set(QUEUE, f"t{number}", rate=rate, burst=max(2, math.ceil(rate * 0.1)))
        publish_many(connection, chain.from_iterable(repeat(f"t{n}", 2) for n in range(active, tenants)))
        sink = Sink(connection)
        sink.drain(tenants - active, 120)  # the one that each of the others may have
        each = math.ceil(rate * (seconds + 2 * warm_up + 10))
        publish_many(connection, chain.from_iterable(repeat([f"t{n}" for n in range(active)], each)))
        first = len(sink.arrivals)
        sink.drain(10**9, seconds + 2 * warm_up)
        sink.close()
        app.close()
    begin = sink.arrivals[first][0] + warm_up
    counts = Counter(tenant for at, tenant, _ in sink.arrivals[first:] if begin <= at < begin + seconds)
    return max(abs(counts[f"t{number}"] / (rate * seconds) - 1) for number in range(active)) * 100


def _change(broker: Broker, tenants: int) -> float:
    """Seconds from a change of the default, which had stopped everybody, to the first arrival."""
    with RedisServer() as server, connect(broker.name, server.port) as connection:
        app: Any = _app(broker, server)
        app.dq.quotas.set_default(QUEUE, paused=True)
        publish_many(connection, (f"t{number}" for number in range(tenants)))
        sink = Sink(connection)
        sink.drain(1, 1.0)
        held = not sink.arrivals
        started = time.monotonic()
        app.dq.quotas.set_default(QUEUE, paused=False)
        sink.drain(tenants // 10, 30)
        sink.close()
        app.close()
    return sink.arrivals[0][0] - started if held and sink.arrivals else math.nan


def fairness(quick: bool) -> Report:
    """Jain's index among equals, weights, and a quiet tenant beside a great backlog."""
    report = Report("fairness")
    report.header = ["broker", "what", "figure", "promise"]
    great = 30_000 if quick else 1_000_000
    for broker in _leased():
        shares = _shares(broker, {f"t{number}": 1.0 for number in range(50)}, 2.0 if quick else 10.0)
        index = jain(list(shares.values()))
        report.row(broker.name, "Jain's index of 50 equals", f"{index:.4f}", ">= 0.99")
        weights = {"one": 1.0, "two": 2.0, "four": 4.0}
        weighed = _shares(broker, weights, 2.0 if quick else 10.0)
        total, heavy = sum(weighed.values()), sum(weights.values())
        errors = {t: weighed[t] / total / (weight / heavy) - 1 for t, weight in weights.items()}
        worst = max(errors.values(), key=abs)
        report.row(broker.name, "worst error of the shares 1 : 2 : 4", f"{worst:+.2%}", "within 2 %")
        alone, beside = _quiet(broker, 0, quick), _quiet(broker, great, quick)
        label = f"quiet tenant's p99 dwell alone / beside {great:,}, ms"
        report.row(broker.name, label, f"{short(alone)} / {short(beside)} = {beside / alone:.2f}x", "<= 2x")
        report.data[broker.name] = {"jain": index, "weights": weighed, "alone": alone, "beside": beside}
    if not report.rows:
        report.notes.append("no active broker has tenants")
    return report


def _shares(broker: Broker, weights: dict[str, float], seconds: float) -> Counter[str]:
    """What each got while all had a backlog."""
    # More than can be consumed: a millisecond of work for each message.
    each = math.ceil(3 * CONSUMERS * seconds * 1000 * max(weights.values()) / sum(weights.values()))
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        app: Any = _app(broker, server)
        stack.callback(app.close)
        for tenant, weight in weights.items():
            app.dq.quotas.set(QUEUE, tenant, weight=weight)
        connection = stack.enter_context(connect(broker.name, server.port))
        names: Iterable[str] = chain.from_iterable(repeat(tenant, each) for tenant in weights)
        publish_many(connection, names)
        consumers = [
            ConsumerProcess(broker.name, server.port, seconds, prefetch=4, work=0.001)
            for _ in range(CONSUMERS)
        ]
        for consumer in consumers:
            stack.callback(consumer.stop)
        rows = [row for consumer in consumers for row in consumer.arrivals(seconds + 60)]
    return Counter(tenant for _, tenant, _ in rows)


def _quiet(broker: Broker, great: int, quick: bool) -> float:
    """p99 dwell in ms of a tenant that publishes now and then, beside `great` messages of another."""
    seconds = 4.0 if quick else 20.0
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        connection = stack.enter_context(connect(broker.name, server.port))
        publish_many(connection, repeat("loud", great))
        consumers = [
            ConsumerProcess(broker.name, server.port, seconds + 1, prefetch=4, work=0.001) for _ in range(2)
        ]
        for consumer in consumers:
            stack.callback(consumer.stop)
        for consumer in consumers:
            consumer.wait_ready()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            publish_many(connection, ["quiet"])
            time.sleep(0.02)  # the beat of a quiet tenant
        rows = [row for consumer in consumers for row in consumer.arrivals(seconds + 60)]
    dwell = [arrived - published for arrived, tenant, published in rows if tenant == "quiet"]
    return percentile(dwell, 0.99) * 1e3
