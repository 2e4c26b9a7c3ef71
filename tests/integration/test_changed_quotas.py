"""A changed quota and the consumer of a backlog, which waits for a wake-up or has no free slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition import Queue
from celery_dq.transport.redis.store.quotas import place_held_back
from tests.broker.claims_harness import ClaimsHarness, turn_until
from tests.integration.partitioned_shop import C
from tests.integration.shop import send
from tests.lua.partition_scripts import PartitionScripts, make_quota, make_record

BACKLOG = 4
#: More tenants than one call places.
MANY = 2_000

Change = Callable[[Any], Any]


@pytest.fixture
def consumer(wide: Any, redis_url: str) -> Iterator[ClaimsHarness]:
    """A consumer of all partitions, with a slot for each message of the backlog."""
    consumer = ClaimsHarness(redis_url, BACKLOG, ())
    with wide.dq._broker.open("push", declare=True) as (partitions, _):
        for each in partitions:
            consumer.claims.subscribe(Queue("push", each))
    yield consumer
    consumer.close()


def call(name: str, *tenant: str, **parts: Any) -> Change:
    """A call of a method of ``app.dq.quotas``."""
    return lambda quotas: getattr(quotas, name)("push", *tenant, **parts)


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize(
    ("before", "change", "got"),
    [
        (call("set", C, rate="1/h"), call("set", C, rate="1000/s"), BACKLOG),
        (call("set", C, rate="1/h"), call("remove", C), BACKLOG),
        (call("set", C, concurrency=1), call("set", C, concurrency=3), 3),
        (call("pause", C), call("resume", C), BACKLOG),
        (call("set_default", rate="1/h"), call("set_default", rate="1000/s"), BACKLOG),
        (call("set_default", paused=True), call("remove_default"), BACKLOG),
    ],
)
def test_a_higher_quota_reaches_a_consumer(
    wide: Any, consumer: ClaimsHarness, before: Change, change: Change, got: int, is_busy: bool
) -> None:
    """Its next look is an hour away, if it has one, so that only a wake-up makes it look."""
    before(wide.dq.quotas)
    send(wide, *[C] * BACKLOG)
    turn_until(lambda: consumer.is_quiet, consumer)
    assert len(consumer.got) < got
    if is_busy:
        consumer.room = len(consumer.got)
        turn_until(lambda: True, consumer)
    change(wide.dq.quotas)
    if is_busy:
        turn_until(lambda: True, consumer)
        consumer.room = BACKLOG
    turn_until(lambda: len(consumer.got) == got, consumer)


@pytest.mark.parametrize(
    ("before", "change", "got"),
    [
        (
            call("set", C, rate="1000/s", burst=10),
            call("set", C, rate="1/h", burst=1),
            2,
        ),  # the new burst has one permit
        (call("remove", C), call("set", C, rate="1/h"), 2),
        (call("remove", C), call("set", C, concurrency=1), 1),
        (call("resume", C), call("pause", C), 1),
        (call("set_default", rate="1000/s", burst=10), call("set_default", rate="1/h", burst=1), 2),
        (call("remove_default"), call("set_default", paused=True), 1),
    ],
)
def test_a_lower_quota_holds_for_the_next_claim(
    wide: Any, consumer: ClaimsHarness, before: Change, change: Change, got: int
) -> None:
    before(wide.dq.quotas)
    send(wide, *[C] * BACKLOG)
    consumer.room = 1
    turn_until(lambda: consumer.got, consumer)
    change(wide.dq.quotas)
    consumer.room = BACKLOG
    turn_until(lambda: consumer.is_quiet, consumer)
    assert len(consumer.got) == got


# A changed default with many tenants.


@pytest.fixture
def held_back(redis_url: str) -> Iterator[PartitionScripts]:
    """Many tenants that a default had paused, and that the default of now lets run."""
    with redis.Redis.from_url(redis_url) as client:
        scripts = PartitionScripts(client)
        scripts.partition.set_default_quota(make_quota(paused=True)).run(client)
        tenants = [f"tenant-{number:04d}" for number in range(MANY)]
        for start in range(0, MANY, 1000):
            messages = [OutgoingRecord(0, each, make_record(each)) for each in tenants[start : start + 1000]]
            scripts.partition.push(messages).run(client)
        assert client.zcard(scripts.keys.paused) == MANY
        scripts.partition.set_default_quota(None).run(client)
        assert not scripts.token()
        yield scripts


def test_a_consumer_is_woken_before_the_last_tenant_has_the_new_default(held_back: PartitionScripts) -> None:
    call = held_back.partition.place_held_back(place="paused", most=100)
    assert call.run(held_back.client) != "0"
    assert held_back.client.zcard(held_back.keys.paused) > MANY / 2
    assert held_back.token()
    assert len(held_back.take(10)) == 10


def test_a_changed_default_sends_no_names_of_tenants(held_back: PartitionScripts) -> None:
    """To read and to send them took a third of the time of the change."""
    held_back.partition.place_held_back(["none"]).run(held_back.client)  # loads the script
    before: Any = held_back.client.info("stats")
    place_held_back([held_back.partition], held_back.client)
    after: Any = held_back.client.info("stats")
    assert held_back.client.zcard(held_back.keys.turn) == MANY
    for way in ("total_net_input_bytes", "total_net_output_bytes"):
        assert after[way] - before[way] < MANY * len("tenant-0000"), way
