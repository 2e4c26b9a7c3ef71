"""One consumer of several queues: turns, groups of waits, several claims. Nothing renews a lease here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import redis

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming import channel_claims, subscriptions
from celery_dq.transport.redis.consuming.consumer_threads import ConsumerThreads
from celery_dq.transport.redis.store.partition import Queue
from tests.broker.claims_harness import LEASE_S, ClaimsHarness, turn_until
from tests.broker.kombu_client import KombuClient, clients_of
from tests.lua.partition_scripts import PartitionScripts

MakeConsumer = Callable[..., ClaimsHarness]

#: Queues of these tests only, because threads of earlier tests may still run.
FIRST, SECOND, THIRD = "first", "second", "third"


@pytest.fixture
def scripts(kombu_client: KombuClient) -> list[PartitionScripts]:
    """The partitions of the queues."""
    return [PartitionScripts(kombu_client.client, name) for name in (FIRST, SECOND, THIRD)]


@pytest.fixture
def make_consumer(kombu_client: KombuClient) -> Iterator[MakeConsumer]:
    made: list[ClaimsHarness] = []

    def make(room: int, *queues: str, process: ConsumerIdentity | None = None) -> ClaimsHarness:
        made.append(ClaimsHarness(kombu_client.url, room, queues, process))
        return made[-1]

    yield make
    for each in made:
        each.close()


def keep_busy(harness: ClaimsHarness, scripts: PartitionScripts) -> None:
    """Begin a backlog that never ends."""

    def send_next() -> None:
        number = len(harness.got)
        harness.room = number + 10
        scripts.push(f"{number}", f"{number} more")

    harness.on_message = send_next
    scripts.push("begin", "begin more")


def test_a_backlog_in_one_queue_does_not_hide_a_message_of_another(
    scripts: list[PartitionScripts], make_consumer: MakeConsumer
) -> None:
    harness = make_consumer(10, FIRST, SECOND)
    turn_until(lambda: harness.is_quiet, harness)
    keep_busy(harness, scripts[0])
    turn_until(lambda: len(harness.got) > 5, harness)
    # A wait may still be under way that began before the backlog. Its answer is the first of these messages.
    for message in ("here", "there"):
        scripts[1].push(message)
        turn_until(partial(harness.got.count, message), harness, timeout_s=8)


def test_a_wakeup_of_one_group_leaves_the_wait_of_another(
    scripts: list[PartitionScripts], make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "GROUP_SIZE", 2)
    harness = make_consumer(10, FIRST, SECOND, THIRD)
    other = harness.claims.wakeups.groups[1]
    assert [len(group.members) for group in harness.claims.wakeups] == [2, 1]
    turn_until(lambda: harness.is_quiet, harness)
    since, connection = other.waiting_since, other.connection.connection
    scripts[0].push("a")
    turn_until(lambda: harness.got == ["a"] and harness.is_quiet, harness)
    assert (other.waiting_since, other.connection.connection) == (since, connection)
    scripts[2].push("b")
    turn_until(lambda: harness.got == ["a", "b"] and harness.is_quiet, harness)


def test_a_group_waits_while_another_one_has_work(
    scripts: list[PartitionScripts], make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "GROUP_SIZE", 1)
    harness = make_consumer(10, FIRST, SECOND)
    keep_busy(harness, scripts[0])
    other = harness.claims.wakeups.groups[1]
    turn_until(lambda: len(harness.got) > 20 and other.is_waiting and not other.is_asking, harness)


def test_the_wait_of_one_group_begins_again_after_a_cut(
    scripts: list[PartitionScripts], make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "GROUP_SIZE", 1)
    harness = make_consumer(10, FIRST, SECOND)
    turn_until(lambda: harness.is_quiet, harness)
    waiting = [each for each in clients_of(scripts[0].client) if each["cmd"] == "blpop"]
    scripts[0].client.client_kill_filter(_id=waiting[1]["id"])
    with pytest.raises(redis.ConnectionError):
        turn_until(lambda: False, harness)
    harness.close()
    scripts[0].push("a")
    scripts[1].push("b")
    again = make_consumer(10, FIRST, SECOND, process=harness.process)
    turn_until(lambda: sorted(again.got) == ["a", "b"] and again.is_quiet, again)


def test_a_group_waits_after_its_queue_was_fenced_for_a_while(
    scripts: list[PartitionScripts], make_consumer: MakeConsumer
) -> None:
    assert scripts[0].partition.fence(1).run(scripts[0].client).accepted
    harness = make_consumer(10, FIRST)
    (subscription,) = harness.claims.subscriptions
    turn_until(lambda: subscription.waits is None, harness)
    assert scripts[0].partition.fence(0).run(scripts[0].client).accepted
    # A message that was released meanwhile may be eligible.
    harness.claims.look_again()
    harness.claims.ready.resume(subscription)
    turn_until(lambda: harness.is_quiet, harness)


def test_claims_under_way_share_the_room(
    scripts: list[PartitionScripts], make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_claims, "MIN_SHARE", 2)
    harness = make_consumer(4, FIRST, SECOND, THIRD)
    turn_until(lambda: harness.is_quiet, harness)
    harness.claims._shares._mean_brought = 1.0
    for number, each in enumerate(scripts):
        each.push(*(f"{number}.{count}" for count in range(20)))
    harness.claims.look_again()
    turn_until(lambda: harness.got, harness)
    assert len(harness.got) == 4


def test_two_claims_bring_one_suspect(scripts: list[PartitionScripts], make_consumer: MakeConsumer) -> None:
    for number, each in enumerate(scripts[:2]):
        each.push(f"suspect {number}")
        (entry,) = each.claim(consumer="dead").entries
        each.partition.release("dead", [(entry.claim, entry.id)], mode="crashed").run(each.client)
    harness = make_consumer(64, FIRST, SECOND)
    harness.claims._shares._mean_brought = 1.0
    turn_until(lambda: harness.got, harness)
    assert len(harness.got) == 1
    harness.process.in_flight.finish(harness.tags[0])
    turn_until(lambda: len(harness.got) == 2, harness)


def test_each_queue_with_work_may_bring_its_suspect(
    scripts: list[PartitionScripts], make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One claim of a trip may bring a suspect. It is not always that of the same queue."""
    monkeypatch.setattr(channel_claims, "MIN_SHARE", 2)
    scripts[1].push("suspect", tenant="x")
    (entry,) = scripts[1].claim(consumer="dead").entries
    scripts[1].partition.release("dead", [(entry.claim, entry.id)], mode="crashed").run(scripts[1].client)
    for number, each in enumerate(scripts):
        for tenant in "abcdefgh":
            each.push(*(f"{number}.{tenant}.{count}" for count in range(100)), tenant=tenant)
    harness = make_consumer(6, FIRST, SECOND, THIRD)
    harness.claims._shares._mean_brought = 1.0

    def go_on() -> None:
        harness.room += 1

    harness.on_message = go_on
    turn_until(lambda: "suspect" in harness.got, harness)
    assert len(harness.got) < 100


def test_a_queue_that_refuses_the_heartbeat_costs_no_other_queue_its_lease(
    scripts: list[PartitionScripts], kombu_client: KombuClient
) -> None:
    process = ConsumerIdentity(LEASE_S)
    threads = process.threads = ConsumerThreads(process)
    queues = [Queue(each.keys.queue, each.partition) for each in scripts]
    scripts[0].client.set(scripts[0].keys.state, "of another program")
    for queue in queues:
        threads.keep_lease(queue, lambda: lambda: redis.Redis.from_url(kombu_client.url))
    threads.renew_now()  # the first round may have begun before the last lease was kept
    wait_until(lambda: all(process.in_flight.is_lease_trusted(each.keys.prefix) for each in scripts[1:]))
    assert not process.in_flight.is_lease_trusted(scripts[0].keys.prefix)
    scripts[0].client.delete(scripts[0].keys.state)
    for queue in queues:
        threads.drop_lease(queue)
    wait_until(lambda: not threads.queues)
    assert not scripts[1].client.zcard(scripts[1].keys.leases)
