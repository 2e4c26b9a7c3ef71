"""Fairness at kombu level: equal shares, weights, and a quiet tenant beside a large backlog.

The stock transport has no tenants, so the results are compared with the promise only.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

from kombu import Connection

from benchmarks.measure import Report, benchmark, interleave, jain, percentile
from benchmarks.postbox import QUEUE, consuming, producer_of, publish_many, publish_one
from benchmarks.quotas import CONSUMERS, serving
from celery_dq.keys import PartitionKeys

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
        "p50": percentile(dwell, 0.5) * 1e3,
        "p99": percentile(dwell, 0.99) * 1e3,
        "queued": percentile((queued for queued, _ in waits), 0.99) * 1e3,
        "in hand": percentile((in_hand for _, in_hand in waits), 0.99) * 1e3,
    }
