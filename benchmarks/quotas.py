"""Quotas at the claim and at kombu level: whether a tenant gets its rate, and never more; and fair shares.

The stock transport has no tenants, so the results are compared with the promise only.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

from celery import Celery
from kombu import Connection

from benchmarks.at_claim import claim_for, keep_house
from benchmarks.measure import (
    Report,
    ServerProbe,
    benchmark,
    interleave,
    jain,
    percentile,
    quantiles_ms,
    short,
)
from benchmarks.postbox import QUEUE, connect, consuming, drain, producer_of, publish_many, publish_one
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from tests.brokers import DQ
from tests.workers import make_app

CONSUMERS = 4


def app_on(server: RedisServer) -> Celery:
    return make_app("bench", DQ, {"broker_url": DQ.url(server.port), "task_default_queue": QUEUE})


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


@benchmark(
    "broker | measured | what | figure | promise",
    """
    claim: script-level consumers, by the clock of Redis, in a transaction; consumers: kombu's, by their own
    batches that lay in a socket come closer together at a consumer than they were claimed
    """,
)
def quotas(report: Report, quick: bool) -> None:
    """Measure each tenant's error, the worst window, and how fast a change acts on a large backlog."""
    seconds, total, tenants, backlog = (10.0, 1_000.0, 20, 6_000) if quick else (60.0, 5_000.0, 100, 60_000)
    rates = rates_of(tenants, total)
    # The promise of the worst window is about claims only.
    for where, arrivals, promise in (("claim", _at_claims, "<= 0"), ("consumers", _at_consumers, "")):
        found = _steady(rates, seconds, arrivals)
        what = f"tenants beyond max(1 %, 1 message) over {seconds:g} s"
        report.row("dq", where, what, found["beyond"], 0)
        report.row("dq", where, "worst error, messages", short(found["worst"]), "max(1 %, 1)")
        what = "worst window beyond rate x window + burst"
        report.row("dq", where, what, short(found["excess"]), promise)
        report.data[where] = found
    first, last = _change(backlog)
    what = "a changed default reaches a waiting consumer within, s"
    report.row("dq", "consumers", what, short(first), "<= 1")
    what = f"it holds for the last of {backlog:,} tenants within, s"
    report.row("dq", "consumers", what, short(last), "<= 1")
    report.data |= {"rates": rates, "change": {"first": first, "last": last}}


def _at_consumers(port: int, seconds: float) -> list[tuple[float, str]]:
    """Return (seconds, tenant) of each message, by the clocks of kombu's consumers."""
    with consuming(CONSUMERS, port, seconds) as consumers:
        return [row[:2] for consumer in consumers for row in consumer.found().arrivals]


def _at_claims(port: int, seconds: float) -> list[tuple[float, str]]:
    """Return (seconds, tenant) of each message, by the clock of Redis."""
    moments = sorted(chain.from_iterable(claim_for(port, QUEUE, seconds, consumers=CONSUMERS)))
    return [((moment.at_us - moments[0].at_us) / 1e6, moment.tenant) for moment in moments]


@contextmanager
def serving() -> Iterator[tuple[Any, Connection, int]]:
    """Run a Redis; yield an app and a connection on it, and its port."""
    with RedisServer() as server, connect("dq", server.port) as connection, app_on(server) as app:
        yield app, connection, server.port


def throttle(app: Any, rates: Mapping[str, float]) -> dict[str, int]:
    """Give tenants their rates; return the burst of each, a tenth of a second or two messages."""
    bursts = {tenant: max(2, math.ceil(rate * 0.1)) for tenant, rate in rates.items()}
    for tenant, rate in rates.items():
        app.dq.quotas.set(QUEUE, tenant, rate=rate, burst=bursts[tenant])
    return bursts


def _steady(
    rates: dict[str, float], seconds: float, arrivals: Callable[[int, float], list[tuple[float, str]]]
) -> dict[str, Any]:
    warm_up = 3.0
    with serving() as (app, connection, port):
        bursts = throttle(app, rates)
        backlog = ((t, math.ceil(rate * (seconds + warm_up + 3)) + bursts[t]) for t, rate in rates.items())
        publish_many(connection, chain.from_iterable(repeat(tenant, amount) for tenant, amount in backlog))
        rows = arrivals(port, seconds + warm_up + 1)
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


def quota_error(tenants: int, seconds: float) -> float:
    """Measure the worst error at the claim, in % of the rate, of tenants beside many throttled ones."""
    active = [f"t{number}" for number in range(min(tenants, 100))]
    rate, warm_up = 2_000 / len(active), 1.0
    with serving() as (app, connection, port):
        app.dq.quotas.set_default(QUEUE, rate="1/h", burst=1)
        throttle(app, dict.fromkeys(active, rate))
        others = range(len(active), tenants)
        publish_many(connection, chain.from_iterable(repeat(f"t{number}", 2) for number in others))
        drain(connection, len(others), 120)  # the one message that each other tenant may start
        each = math.ceil(rate * (seconds + 2 * warm_up + 10))
        publish_many(connection, chain.from_iterable(repeat(active, each)))
        rows = _at_claims(port, seconds + 2 * warm_up)
    counts = Counter(tenant for at, tenant in rows if warm_up <= at < warm_up + seconds)
    return max(abs(counts[tenant] / (rate * seconds) - 1) for tenant in active) * 100


def idle_bytes(tenants: int) -> float:
    """Measure the memory of each tenant with a rate and without messages, after its limiter has recovered."""
    with serving() as (app, connection, port), closing(ServerProbe(port)) as probe:
        app.dq.quotas.set_default(QUEUE, rate=1000, burst=2)
        publish_many(connection, (f"t{number}" for number in range(tenants)))
        drain(connection, tenants, 120)
        # The maintenance takes longer than the millisecond until the last limiter has recovered.
        keep_house(port, QUEUE, tenants // 1000 + 10)
        return probe.bytes_of_tenants() / tenants


def _change(tenants: int) -> tuple[float, float]:
    """Measure a change of the default, which had paused all tenants.

    Returns:
        The seconds from the call until a message arrives at a consumer that waits, and until the call has
        placed the last tenant and returns. The consumer takes messages meanwhile.
    """
    with serving() as (app, connection, port):
        app.dq.quotas.set_default(QUEUE, paused=True)
        publish_many(connection, (f"t{number}" for number in range(tenants)))
        with consuming(1, port, 10) as (consumer,):
            time.sleep(2)  # the consumer has looked, and waits
            started = time.monotonic()
            app.dq.quotas.set_default(QUEUE, paused=False)
            last = time.monotonic() - started
            arrivals = [at - started for at, _, _ in consumer.found().arrivals]
    return (min(arrivals), last) if arrivals and min(arrivals) > 0 else (math.nan, math.nan)


#: Seconds of work that a consumer does for each message.
WORK = 0.001
#: Seconds between two messages of a quiet tenant.
BEAT = 0.02
#: Messages/s of the loud tenant where the consumers have time.
LOUD_RATE = 300


class Case(NamedTuple):
    """One situation of the quiet tenant."""

    queue: str
    prefetch: int
    #: Rate of the loud tenant in messages/s; None is unlimited.
    loud: float | None
    #: Why the loud tenant's messages will not run; "" if they run.
    discards: str = ""


CASES = {
    "alone": Case("calm", 4, None),
    "a slot is free": Case("crowded", 4, LOUD_RATE),
    "all busy, prefetch 1": Case("crowded", 1, None),
    "all busy, prefetch 4": Case("crowded", 4, None),
    "beside cancelled": Case("cancelled", 4, None, "cancelled"),
    "beside expired": Case("expired", 4, None, "expired"),
}


@benchmark("broker | what | figure | promise")
def fairness(report: Report, quick: bool) -> None:
    """Jain's index among equals, and the shares by weight."""
    seconds = 2.0 if quick else 10.0
    index = jain(list(_shares({f"t{number}": 1.0 for number in range(50)}, seconds).values()))
    report.row("dq", "Jain's index of 50 equals", f"{index:.4f}", ">= 0.99")
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    weighed = _shares(weights, seconds)
    total, heavy = sum(weighed.values()), sum(weights.values())
    errors = [weighed[tenant] / total / (weight / heavy) - 1 for tenant, weight in weights.items()]
    report.row("dq", "worst error of the shares 1 : 2 : 4", f"{max(errors, key=abs):+.2%}", "within 2 %")
    report.data = {"jain": index, "weights": weighed}


def _shares(weights: dict[str, float], seconds: float) -> Counter[str]:
    """Return the messages of each tenant while all tenants had a backlog."""
    # More than can be consumed, with a millisecond of work per message.
    each = math.ceil(3 * CONSUMERS * seconds * 1000 * max(weights.values()) / sum(weights.values()))
    with serving() as (app, connection, port):
        for tenant, weight in weights.items():
            app.dq.quotas.set(QUEUE, tenant, weight=weight)
        publish_many(connection, chain.from_iterable(repeat(tenant, each) for tenant in weights))
        with consuming(CONSUMERS, port, seconds, prefetch=4, work=WORK) as consumers:
            return Counter(tenant for each in consumers for _, tenant, _ in each.found().arrivals)


@benchmark(
    "case | dwell p50 ms | dwell p99 ms | p99 vs alone | until claimed | in hand",
    f"""
    two consumers, {WORK * 1e3:g} ms of work for each message
    the quiet tenant publishes every {BEAT * 1e3:g} ms, the loud one has {{great:,}} waiting
    until claimed: p99 from the push to the claim, by the clock of Redis
    in hand: p99 from the claim to the consumer's callback, behind what it has claimed before
    a slot is free: the loud tenant's rate is {LOUD_RATE:g}/s, so that the consumers have time
    all busy: each message waits until one of two has room
    beside cancelled, beside expired: the loud tenant has {{dull:,}} messages that will not run
    these are measured until the consumers have recorded them
    """,
)
def quiet(report: Report, quick: bool) -> None:
    """Measure the wait of a tenant with few messages, alone and beside a tenant with a large backlog."""
    great, dull, rounds, seconds = (30_000, 20_000, 2, 3.0) if quick else (1_000_000, 100_000, 5, 10.0)
    report.fill_in(great=great, dull=dull)
    with serving() as (app, connection, port):
        publish_many(connection, repeat("loud", great), CASES["all busy, prefetch 4"].queue)
        found = interleave(list(CASES), rounds, partial(_wait, app, connection, port, seconds, dull), 300)
    report.compare(found, "alone", "p50 | p99 | vs p99 | queued | in hand")


def _wait(
    app: Any, connection: Connection, port: int, seconds: float, dull: int, name: str
) -> dict[str, float]:
    """Milliseconds that the quiet tenant's messages wait in one case."""
    case = CASES[name]
    app.dq.quotas.set(case.queue, "loud", rate=case.loud)
    producer = producer_of(connection, case.queue)
    channel: Any = producer.channel
    if case.discards:
        # The first messages expire while the later ones are published.
        options = {"expiration": 0.001} if case.discards == "expired" else {}
        publish_many(connection, repeat("loud", dull), case.queue, **options)
    if case.discards == "cancelled":
        app.dq.queues[case.queue].cancel_tenant("loud")
    messages = PartitionKeys("online", case.queue).messages
    more = {"prefetch": case.prefetch, "work": WORK, "queue": case.queue, "watched": "quiet"}
    with consuming(2, port, seconds + 1, **more) as consumers:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if case.discards and channel.client.hlen(messages) < dull / 100:
                break
            publish_one(producer, "quiet", case.queue)
            time.sleep(BEAT)  # the interval of a quiet tenant
        found = [consumer.found() for consumer in consumers]
    channel.close()
    rows = chain.from_iterable(each.arrivals for each in found)
    dwell = [arrived - published for arrived, tenant, published in rows if tenant == "quiet"]
    waits = [wait for each in found for wait in each.waits]
    return {
        **quantiles_ms(dwell),
        "queued": percentile((queued for queued, _ in waits), 0.99) * 1e3,
        "in hand": percentile((in_hand for _, in_hand in waits), 0.99) * 1e3,
    }
