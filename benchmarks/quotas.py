"""Quotas at the claim and at kombu level: whether a tenant gets its rate, and never more.

The stock transport has no quotas, so the results are compared with the promise only.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain, repeat
from typing import Any

from celery import Celery

from benchmarks.at_claim import claim_for, keep_house
from benchmarks.measure import Report, ServerProbe, short
from benchmarks.postbox import QUEUE, ConsumerProcess, Sink, connect, publish_many
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS, Broker
from tests.workers import make_app

CONSUMERS = 4


def leased() -> list[Broker]:
    return [BROKERS[name] for name in ACTIVE if BROKERS[name].has_leases]


def app_on(broker: Broker, server: RedisServer) -> Celery:
    return make_app("bench", broker, {"broker_url": broker.url(server.port), "task_default_queue": QUEUE})


def rates_of(tenants: int, total: float) -> dict[str, float]:
    """Return rates from 1/s to total/10 in a geometric series, scaled to a sum of `total`."""
    top = total / 10
    row = [top ** (index / (tenants - 1)) for index in range(tenants)]
    # The ends stay, and the rates between share the rest.
    scale = (total - row[0] - row[-1]) / sum(row[1:-1])
    return {
        f"t{index}": rate if index in (0, tenants - 1) else max(1.0, rate * scale)
        for index, rate in enumerate(row)
    }


def worst_excess(arrivals: list[float], rate: float, burst: float) -> float:
    """Return the largest excess of a window over rate x window + burst; negative for none."""
    worst, lowest = -math.inf, math.inf
    for index, moment in enumerate(sorted(arrivals)):
        lowest = min(lowest, index - rate * moment)
        worst = max(worst, (index + 1 - rate * moment) - lowest - burst)
    # A burst that is used completely is not an excess. The tolerance is for rounding errors.
    return round(worst, 6) + 0.0


def quotas(quick: bool) -> Report:
    """Measure each tenant's error, the worst window, and how fast a change acts on a large backlog."""
    report = Report("quotas")
    report.header = ["broker", "measured", "what", "figure", "promise"]
    report.notes.append(
        "claim: script-level consumers, by the clock of Redis, in a transaction; consumers: kombu's, by their"
        " own clocks, where batches that lay in a socket come closer together than they were claimed"
    )
    seconds, total, tenants = (10.0, 1_000.0, 20) if quick else (60.0, 5_000.0, 100)
    rates = rates_of(tenants, total)
    for broker in leased():
        report.data[broker.name] = {"rates": rates}
        for where, arrivals in (("claim", _at_claims), ("consumers", _at_consumers)):
            found = _steady(broker, rates, seconds, arrivals)
            what = f"tenants beyond max(1 %, 1 message) over {seconds:g} s"
            report.row(broker.name, where, what, found["beyond"], 0)
            report.row(broker.name, where, "worst error, messages", short(found["worst"]), "max(1 %, 1)")
            # The promise is about claims only.
            excess, promise = short(found["excess"]), "<= 0" if where == "claim" else ""
            report.row(broker.name, where, "worst window beyond rate x window + burst", excess, promise)
            report.data[broker.name][where] = found
        backlog = 6_000 if quick else 60_000
        first, last = _change(broker, backlog)
        what = "a changed default reaches a waiting consumer within, s"
        report.row(broker.name, "consumers", what, short(first), "<= 1")
        what = f"it holds for the last of {backlog:,} tenants within, s"
        report.row(broker.name, "consumers", what, short(last), "<= 1")
        report.data[broker.name]["change"] = {"first": first, "last": last}
    if not report.rows:
        report.notes.append("no active broker has quotas")
    return report


def _at_consumers(broker: Broker, port: int, seconds: float) -> list[tuple[float, str]]:
    """Return (seconds, tenant) of each message, by the clocks of kombu's consumers."""
    with ExitStack() as stack:
        consumers = [ConsumerProcess(broker.name, port, seconds) for _ in range(CONSUMERS)]
        for consumer in consumers:
            stack.callback(consumer.stop)
        for consumer in consumers:
            consumer.wait_ready()
        return [row[:2] for consumer in consumers for row in consumer.arrivals(seconds + 60)]


def _at_claims(broker: Broker, port: int, seconds: float) -> list[tuple[float, str]]:
    """Return (seconds, tenant) of each message, by the clock of Redis."""
    found = chain.from_iterable(claim_for(port, QUEUE, seconds, consumers=CONSUMERS))
    moments = sorted(found)
    return [((moment.at_us - moments[0].at_us) / 1e6, moment.tenant) for moment in moments]


def _steady(
    broker: Broker,
    rates: dict[str, float],
    seconds: float,
    arrivals: Callable[[Broker, int, float], list[tuple[float, str]]],
) -> dict[str, Any]:
    warm_up = 3.0
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        app: Any = app_on(broker, server)
        stack.callback(app.close)
        bursts = {tenant: max(2, math.ceil(rate * 0.1)) for tenant, rate in rates.items()}
        for tenant, rate in rates.items():
            app.dq.quotas.set(QUEUE, tenant, rate=rate, burst=bursts[tenant])
        connection = stack.enter_context(connect(broker.name, server.port))
        backlog = ((t, math.ceil(rate * (seconds + warm_up + 3)) + bursts[t]) for t, rate in rates.items())
        publish_many(connection, chain.from_iterable(repeat(tenant, amount) for tenant, amount in backlog))
        rows = arrivals(broker, server.port, seconds + warm_up + 1)
    times: dict[str, list[float]] = defaultdict(list)
    for moment, tenant in rows:
        times[tenant].append(moment)
    begin = min(moment for moment, _ in rows) + warm_up
    end = begin + seconds
    errors = {t: sum(begin <= at < end for at in times[t]) - rate * seconds for t, rate in rates.items()}
    excess = max(worst_excess(times[tenant], rate, bursts[tenant]) for tenant, rate in rates.items())
    beyond = [t for t, error in errors.items() if abs(error) > max(0.01 * rates[t] * seconds, 1)]
    worst = max(errors.values(), key=abs)
    return {"beyond": len(beyond), "worst": worst, "excess": excess, "errors": errors}


def quota_error(broker: Broker, tenants: int, seconds: float) -> float:
    """Measure the worst error at the claim, in % of the rate, of tenants beside many throttled ones."""
    active = min(tenants, 100)
    rate, warm_up = 2_000 / active, 1.0
    with RedisServer() as server, connect(broker.name, server.port) as connection:
        app: Any = app_on(broker, server)
        app.dq.quotas.set_default(QUEUE, rate="1/h", burst=1)
        for number in range(active):
            app.dq.quotas.set(QUEUE, f"t{number}", rate=rate, burst=max(2, math.ceil(rate * 0.1)))
        publish_many(connection, chain.from_iterable(repeat(f"t{n}", 2) for n in range(active, tenants)))
        sink = Sink(connection)
        sink.drain(tenants - active, 120)  # the one message that each other tenant may start
        sink.close()
        each = math.ceil(rate * (seconds + 2 * warm_up + 10))
        publish_many(connection, chain.from_iterable(repeat([f"t{n}" for n in range(active)], each)))
        rows = _at_claims(broker, server.port, seconds + 2 * warm_up)
        app.close()
    counts = Counter(tenant for at, tenant in rows if warm_up <= at < warm_up + seconds)
    return max(abs(counts[f"t{number}"] / (rate * seconds) - 1) for number in range(active)) * 100


def idle_bytes(broker: Broker, tenants: int) -> float:
    """Measure the memory of each tenant with a rate and without messages, after its limiter has recovered."""
    with RedisServer() as server, connect(broker.name, server.port) as connection:
        app: Any = app_on(broker, server)
        app.dq.quotas.set_default(QUEUE, rate=1000, burst=2)
        publish_many(connection, (f"t{number}" for number in range(tenants)))
        sink = Sink(connection)
        sink.drain(tenants, 120)
        sink.close()
        app.close()
        probe = ServerProbe(server.port)
        # The maintenance takes longer than the millisecond until the last limiter has recovered.
        keep_house(server.port, QUEUE, tenants // 1000 + 10)
        total = probe.bytes_of_tenants()
        probe.close()
    return total / tenants


def _change(broker: Broker, tenants: int) -> tuple[float, float]:
    """Measure a change of the default, which had paused all tenants.

    Returns:
        The seconds from the call until a message arrives at a consumer that waits, and until the call has
        placed the last tenant and returns. The consumer takes messages meanwhile.
    """
    with RedisServer() as server, connect(broker.name, server.port) as connection, ExitStack() as stack:
        app: Any = app_on(broker, server)
        stack.callback(app.close)
        app.dq.quotas.set_default(QUEUE, paused=True)
        publish_many(connection, (f"t{number}" for number in range(tenants)))
        consumer = ConsumerProcess(broker.name, server.port, 10)
        stack.callback(consumer.stop)
        consumer.wait_ready()
        time.sleep(2)  # the consumer has looked, and waits
        started = time.monotonic()
        app.dq.quotas.set_default(QUEUE, paused=False)
        last = time.monotonic() - started
        arrivals = [at - started for at, _, _ in consumer.arrivals(60)]
    return (min(arrivals), last) if arrivals and min(arrivals) > 0 else (math.nan, math.nan)
