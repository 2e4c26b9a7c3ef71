"""Heartbeats of several queues in one round trip: lost answers, and the size of a trip."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_dq.clock import ManualClock
from celery_dq.transport.in_flight import InFlightMessage
from celery_dq.transport.partition_replies import HeartbeatReply
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming.consumer_thread import MIN_ROUND_S, Leases, Trip
from celery_dq.transport.redis.store.partition import Partition, Queue
from celery_dq.transport.redis.store.script_calls import PipelinedConnection, ScriptCall
from tests.broker.claims_harness import LEASE_S
from tests.broker.kombu_client import KombuClient
from tests.broker.proxy import Proxy
from tests.lua.partition_scripts import PartitionScripts

#: More messages than one call of a trip of two moves, and fewer than two calls.
MANY = 150


@dataclasses.dataclass(eq=False, slots=True)
class Quit(ScriptCall[HeartbeatReply]):
    """A call after whose answer Redis closes the connection."""

    def command(self, full: bool = False) -> tuple[Any, ...]:
        return ("QUIT",)


class ClosingPartition(Partition):
    """A partition with whose heartbeat the connection ends."""

    def heartbeat(self, *args: Any, **options: Any) -> ScriptCall[HeartbeatReply]:
        call = super().heartbeat(*args, **options)
        return Quit(call.script, call.keys, call.args, lambda _: HeartbeatReply(True, 0))


class WatchedPartition(Partition):
    """A partition that remembers the limits of its calls."""

    def resign(self, consumer: str, *, limit: int = 0) -> ScriptCall[int]:
        self.limits = [*getattr(self, "limits", ()), limit]
        return super().resign(consumer, limit=limit)


def renew(process: ConsumerIdentity, queues: list[Queue], client: redis.Redis) -> float:
    """Renew the leases on these queues in one trip; return the seconds until the next round."""
    leases, now = Leases(process), process.clock.monotonic()
    for queue in queues:
        leases.keep(queue)
    trip = Trip(now, process.refusals)
    leases.plan(trip)
    error = trip.run(PipelinedConnection(client.connection_pool))
    if error is not None:
        raise error
    assert leases.in_round
    assert leases.end_round(now)
    return leases.round_at - now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def process(clock: ManualClock) -> ConsumerIdentity:
    return ConsumerIdentity(LEASE_S, clock)


@pytest.fixture
def scripts(kombu_client: KombuClient) -> list[PartitionScripts]:
    """The partitions of three queues."""
    return [PartitionScripts(kombu_client.client, name) for name in ("first", "second", "third")]


@pytest.fixture
def queues(scripts: list[PartitionScripts]) -> list[Queue]:
    return [Queue(each.keys.queue, each.partition) for each in scripts]


@pytest.fixture
def claim(process: ConsumerIdentity, queues: list[Queue]) -> Callable[[Any], InFlightMessage]:
    """Claims the only message of the first queue."""

    def claim(client: Any) -> InFlightMessage:
        sent_at = process.clock.monotonic()
        claimed = queues[0].partition.claim(process.consumer, lease_ms=process.lease_ms, want=1).run(client)
        [(_, held)] = process.claimed(queues[0], claimed, sent_at)
        assert held is not None
        return held

    return claim


def test_a_lost_lease_is_noticed_though_a_later_answer_of_the_trip_is_lost(
    scripts: list[PartitionScripts],
    queues: list[Queue],
    process: ConsumerIdentity,
    claim: Callable[[Any], InFlightMessage],
) -> None:
    client = scripts[0].client
    scripts[0].push("m")
    held = claim(client)
    scripts[0].lose(process.consumer)
    assert scripts[0].reap() == 1
    assert scripts[0].take(consumer="other") == ["m"]
    queues[1] = Queue("second", ClosingPartition(scripts[1].keys, scripts[1].partition.scripts))
    with pytest.raises(redis.ConnectionError):
        renew(process, queues, client)
    renew(process, queues[:1], client)
    assert process.in_flight.is_lease_trusted(queues[0].key)
    assert held.tag not in process.in_flight


def test_an_error_of_one_queue_does_not_hide_the_answer_of_the_next(
    scripts: list[PartitionScripts],
    queues: list[Queue],
    process: ConsumerIdentity,
    claim: Callable[[Any], InFlightMessage],
    kombu_client: KombuClient,
) -> None:
    scripts[0].push("m")
    held = claim(kombu_client.client)
    scripts[0].lose(process.consumer)
    scripts[0].reap()

    def fail(reply: Any) -> HeartbeatReply:
        raise redis.exceptions.ReadOnlyError("READONLY")

    class PassingPartition(Partition):
        def heartbeat(self, *args: Any, **options: Any) -> ScriptCall[HeartbeatReply]:
            return dataclasses.replace(super().heartbeat(*args, **options), parse=fail)

    failing = Queue("second", PassingPartition(scripts[1].keys, scripts[1].partition.scripts))
    with pytest.raises(redis.exceptions.ReadOnlyError):
        renew(process, [failing, queues[0]], kombu_client.client)
    assert held.tag not in process.in_flight


@pytest.mark.parametrize("reaped", [True, False])
def test_messages_are_released_when_the_lost_answer_may_be_that_the_lease_was_lost(
    scripts: list[PartitionScripts],
    queues: list[Queue],
    process: ConsumerIdentity,
    clock: ManualClock,
    claim: Callable[[Any], InFlightMessage],
    kombu_client: KombuClient,
    proxy: Proxy,
    reaped: bool,
) -> None:
    scripts[0].push("m")
    held = claim(kombu_client.client)
    if reaped:
        scripts[0].lose(process.consumer)
        assert scripts[0].reap() == 1
        assert scripts[0].take(consumer="other") == ["m"]
    proxy.drop_answers_to = scripts[0].partition.heartbeat("", lease_ms=1).script.sha1.encode()
    database = kombu_client.url.rsplit("/", 1)[1]
    with redis.Redis(port=proxy.port, db=int(database)) as client:
        proxy.drops_left = 1
        with pytest.raises(redis.ConnectionError):
            renew(process, queues, client)
        assert held.tag in process.in_flight  # the lease cannot have expired yet
        clock.advance(LEASE_S + 1)
        proxy.drops_left = 1
        with pytest.raises(redis.ConnectionError):
            renew(process, queues, client)
        renew(process, queues, client)
        process.in_flight.send_acks(process.consumer, queues[0], client)
    assert process.in_flight.is_lease_trusted(queues[0].key)
    assert held.tag not in process.in_flight
    assert scripts[0].waiting() == ([] if reaped else ["m"])


def test_the_queues_of_a_trip_share_the_messages_that_it_moves(
    scripts: list[PartitionScripts], queues: list[Queue], process: ConsumerIdentity
) -> None:
    client = scripts[0].client
    for each in scripts[:2]:
        each.push(*(f"{number}" for number in range(MANY)))
        each.claim(MANY, consumer="dead")
        each.lose("dead")
    assert renew(process, queues[:2], client) <= MIN_ROUND_S  # the next round comes at once
    assert [len(each.waiting()) for each in scripts[:2]] == [100, 100]
    assert renew(process, queues[:2], client) > MIN_ROUND_S
    assert [len(each.waiting()) for each in scripts[:2]] == [MANY, MANY]


def test_the_queues_that_are_given_back_share_the_messages_of_a_trip(
    scripts: list[PartitionScripts], process: ConsumerIdentity
) -> None:
    partitions = [WatchedPartition(each.keys, each.partition.scripts) for each in scripts[:2]]
    for each in scripts[:2]:
        each.push(*(f"{number}" for number in range(MANY)))
        each.claim(MANY, consumer=process.consumer)
    queues = [Queue(each.keys.queue, each) for each in partitions]
    leases = Leases(process)
    leases.queues.update({queue.key: queue for queue in queues})
    leases.resign(scripts[0].client)
    assert [each.limits for each in partitions] == [[100, 100], [100, 100]]
    assert [len(each.waiting()) for each in scripts[:2]] == [MANY, MANY]
