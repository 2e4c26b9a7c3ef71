"""Fairness at kombu level: equal shares, weights, and a quiet tenant beside a large backlog.

The stock transport has no tenants, so the results are compared with the promise only.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

from kombu import Producer, Queue

from benchmarks.measure import Report, dump, interleave, jain, percentile, ratio
from benchmarks.postbox import QUEUE, ConsumerProcess, connect, publish_many, publish_one
from benchmarks.quotas import CONSUMERS, app_on, leased
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from tests.brokers import Broker

#: Seconds of work that a consumer does for each message.
WORK = 0.001
#: Seconds between two messages of a quiet tenant.
BEAT = 0.02


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
    "a slot is free": Case("crowded", 4, 300),
    "all busy, prefetch 1": Case("crowded", 1, None),
    "all busy, prefetch 4": Case("crowded", 4, None),
    "beside cancelled": Case("cancelled", 4, None, "cancelled"),
    "beside expired": Case("expired", 4, None, "expired"),
}


def fairness(quick: bool) -> Report:
    """Jain's index among equals, weights, and a quiet tenant beside a great backlog."""
    report = Report("fairness")
    report.header = ["broker", "what", "figure", "promise"]
    for broker in leased():
        shares = _shares(broker, {f"t{number}": 1.0 for number in range(50)}, 2.0 if quick else 10.0)
        index = jain(list(shares.values()))
        report.row(broker.name, "Jain's index of 50 equals", f"{index:.4f}", ">= 0.99")
        weights = {"one": 1.0, "two": 2.0, "four": 4.0}
        weighed = _shares(broker, weights, 2.0 if quick else 10.0)
        total, heavy = sum(weighed.values()), sum(weights.values())
        errors = {t: weighed[t] / total / (weight / heavy) - 1 for t, weight in weights.items()}
        worst = max(errors.values(), key=abs)
        report.row(broker.name, "worst error of the shares 1 : 2 : 4", f"{worst:+.2%}", "within 2 %")
        report.data[broker.name] = {"jain": index, "weights": weighed}
    if not report.rows:
        report.notes.append("no active broker has tenants")
    return report


def _shares(broker: Broker, weights: dict[str, float], seconds: float) -> Counter[str]:
    """Return the messages of each tenant while all tenants had a backlog."""
    # More than can be consumed, with a millisecond of work per message.
    each = math.ceil(3 * CONSUMERS * seconds * 1000 * max(weights.values()) / sum(weights.values()))
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        app: Any = app_on(broker, server)
        stack.callback(app.close)
        for tenant, weight in weights.items():
            app.dq.quotas.set(QUEUE, tenant, weight=weight)
        connection = stack.enter_context(connect(broker.name, server.port))
        names: Iterable[str] = chain.from_iterable(repeat(tenant, each) for tenant in weights)
        publish_many(connection, names)
        consumers = [
            ConsumerProcess(broker.name, server.port, seconds, prefetch=4, work=WORK)
            for _ in range(CONSUMERS)
        ]
        for consumer in consumers:
            stack.callback(consumer.stop)
        rows = [row for consumer in consumers for row in consumer.arrivals(seconds + 60)]
    return Counter(tenant for _, tenant, _ in rows)


def quiet(quick: bool) -> Report:
    """Measure the wait of a tenant with few messages, alone and beside a tenant with a large backlog."""
    report = Report("quiet")
    report.header = ["case", "dwell p50 ms", "dwell p99 ms", "p99 vs alone", "until claimed", "in hand"]
    great, dull, rounds, seconds = (30_000, 20_000, 2, 3.0) if quick else (1_000_000, 100_000, 5, 10.0)
    report.notes.append(
        f"two consumers, {WORK * 1e3:g} ms of work for each message; the quiet tenant publishes every"
        f" {BEAT * 1e3:g} ms, the loud one has {great:,} waiting"
    )
    report.notes.append(
        "until claimed: p99 from the push to the claim, by the clock of Redis; in hand: p99 from the claim to"
        " the consumer's callback, behind what it has claimed before"
    )
    report.notes.append(
        f"a slot is free: the loud tenant's rate is {CASES['a slot is free'].loud:g}/s, so that the consumers"
        " have time; all busy: each message waits until one of two has room"
    )
    report.notes.append(
        f"beside cancelled, beside expired: the loud tenant has {dull:,} messages that will not run; measured"
        " until the consumers have recorded them"
    )
    for broker in leased():
        with RedisServer() as server, connect(broker.name, server.port) as connection:
            publish_many(connection, repeat("loud", great), CASES["all busy, prefetch 4"].queue)
            found = interleave(list(CASES), rounds, partial(_wait, broker, server, seconds, dull), 300)
        for name, row in found.items():
            against = ratio(row["p99"], found["alone"]["p99"])
            report.row(name, row["p50"], row["p99"], against, row["queued"], row["in hand"])
        report.data[broker.name] = dump(found)
    return report


def _wait(broker: Broker, server: RedisServer, seconds: float, dull: int, name: str) -> dict[str, float]:
    """Milliseconds that the quiet tenant's messages wait in one case."""
    case = CASES[name]
    with ExitStack() as stack:
        app: Any = app_on(broker, server)
        stack.callback(app.close)
        app.dq.quotas.set(case.queue, "loud", rate=case.loud)
        connection = stack.enter_context(connect(broker.name, server.port))
        channel: Any = connection.channel()
        Queue(case.queue)(channel).declare()
        producer = Producer(channel)
        if case.discards:
            # The first messages expire while the later ones are published.
            options = {"expiration": 0.001} if case.discards == "expired" else {}
            publish_many(connection, repeat("loud", dull), case.queue, **options)
        if case.discards == "cancelled":
            app.dq.queues[case.queue].cancel_tenant("loud")
        messages = PartitionKeys("online", case.queue).messages
        consumers = [
            ConsumerProcess(
                broker.name,
                server.port,
                seconds + 1,
                prefetch=case.prefetch,
                work=WORK,
                queue=case.queue,
                watched="quiet",
            )
            for _ in range(2)
        ]
        for consumer in consumers:
            stack.callback(consumer.stop)
        for consumer in consumers:
            consumer.wait_ready()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if case.discards and channel.client.hlen(messages) < dull / 100:
                break
            publish_one(producer, "quiet", case.queue)
            time.sleep(BEAT)  # the interval of a quiet tenant
        found = [consumer.found(seconds + 60) for consumer in consumers]
    rows = chain.from_iterable(each.arrivals for each in found)
    dwell = [arrived - published for arrived, tenant, published in rows if tenant == "quiet"]
    waits = [wait for each in found for wait in each.waits]
    return {
        "p50": percentile(dwell, 0.5) * 1e3,
        "p99": percentile(dwell, 0.99) * 1e3,
        "queued": percentile((queued for queued, _ in waits), 0.99) * 1e3,
        "in hand": percentile((in_hand for _, in_hand in waits), 0.99) * 1e3,
    }
