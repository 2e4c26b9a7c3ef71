"""No wake-up is lost, late or withheld when one consumer has several queues."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consuming import channel_claims, consumer_thread
from celery_dq.transport.redis.consuming.subscriptions import Subscription, WakeupListener
from celery_dq.transport.redis.store.partition import Partition, Queue
from tests.broker.claims_harness import ClaimsHarness, turn_until
from tests.broker.kombu_client import KombuClient
from tests.lua.partition_scripts import PartitionScripts, make_quota

FIRST, SECOND = "first", "second"


@pytest.fixture
def scripts(kombu_client: KombuClient) -> list[PartitionScripts]:
    return [PartitionScripts(kombu_client.client, name) for name in (FIRST, SECOND)]


@pytest.fixture
def harness(kombu_client: KombuClient) -> Iterator[ClaimsHarness]:
    """A consumer of both queues that waits for a wake-up."""
    harness = ClaimsHarness(kombu_client.url, 10, (FIRST, SECOND))
    turn_until(lambda: harness.is_quiet, harness)
    yield harness
    harness.close()


@pytest.mark.parametrize("call", ["ask", "start_wait"])
def test_the_queue_that_was_served_is_served_last(
    scripts: list[PartitionScripts], harness: ClaimsHarness, call: str
) -> None:
    group = harness.claims.wakeups.groups[0]
    group.cancel_wait()
    served = []
    for each in scripts:
        scripts[0].client.rpush(each.keys.wake, "1")
    for _ in scripts:
        getattr(group, call)(time.monotonic())
        (subscription,) = group.read_wakeups()
        assert subscription is not None
        served.append(subscription.queue.name)
        scripts[0].client.rpush(scripts[0].keys.wake, "1")
    assert served == [FIRST, SECOND]


def test_a_question_is_answered_at_once(harness: ClaimsHarness) -> None:
    group = harness.claims.wakeups.groups[0]
    group.cancel_wait()
    took_s = []
    for _ in range(5):
        asked_at = time.monotonic()
        group.ask(asked_at)
        assert group.read_wakeups() == []
        took_s.append(time.monotonic() - asked_at)
    assert min(took_s) < 0.04  # an idle Redis ends a wait of 1 ms after about 90 ms


def test_room_that_is_made_while_a_turn_ends_begins_the_next_one(
    scripts: list[PartitionScripts], harness: ClaimsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "capacity", lambda _: (0, 0))
    monkeypatch.setattr(consumer_thread, "MAX_WAIT_S", 60.0)
    scripts[0].push("a")
    harness.turn()  # ends with the wake-up
    monkeypatch.setattr(harness, "after_trip", lambda _: harness.thread.has_room())
    began = time.monotonic()
    harness.turn()
    assert time.monotonic() - began < 30


def test_a_backoff_ends_when_a_slot_becomes_free(
    scripts: list[PartitionScripts], harness: ClaimsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    monkeypatch.setattr(harness, "capacity", lambda _: (4, free))
    make_limited(scripts)
    scripts[0].push("a", tenant="t")
    subscription = harness.claims.subscriptions[0]
    turn_until(lambda: subscription.backoff_until, harness)
    make_longer(harness, subscription)
    free = 1
    turn_until(lambda: harness.got == ["a"], harness, timeout_s=5)


def test_a_backoff_ends_when_the_claims_of_other_queues_leave_a_slot(
    scripts: list[PartitionScripts], harness: ClaimsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "capacity", lambda _: (64, 1))
    harness.claims._shares._mean_brought = 1.0
    make_limited(scripts)
    scripts[1].push("a", tenant="t")
    harness.claims.look_again()
    subscription = harness.claims.subscriptions[1]
    turn_until(lambda: subscription.backoff_until, harness)  # the first claim may use the slot
    make_longer(harness, subscription)
    turn_until(lambda: harness.got == ["a"], harness, timeout_s=5)


def test_claims_without_a_free_slot_back_off_at_once(
    scripts: list[PartitionScripts], harness: ClaimsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "capacity", lambda _: (64, 0))
    harness.claims._shares._mean_brought = 1.0
    make_limited(scripts)
    for each in scripts:
        each.push("a", tenant="t")
    harness.claims.look_again()
    turn_until(lambda: all(each.backoff_until for each in harness.claims.subscriptions), harness)
    assert harness.got == []


def test_the_wakeup_of_a_queue_survives_the_cancellation_of_another_one(
    scripts: list[PartitionScripts], harness: ClaimsHarness
) -> None:
    scripts[1].push("a")
    wait_until(harness.claims.wakeups.groups[0].connection.has_unread_input)
    harness.room = 0
    harness.claims.unsubscribe(PartitionKeys("online", FIRST).prefix)
    turn_until(scripts[1].token, harness, timeout_s=5)


def test_singleton_queues_do_not_withhold_the_wakeups_of_others(
    scripts: list[PartitionScripts], harness: ClaimsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_claims, "MAX_HANDOVERS", 1)
    harness.room = 0
    harness.claims.wakeups.groups[0].cancel_wait()
    scripts[0].push("a")
    assert scripts[0].take_token()
    alone = Partition(PartitionKeys("online", "alone"), harness.process.scripts)
    harness.claims.ready.rely_on(harness.claims.subscribe(Queue("alone", alone, token=1)))
    harness.claims.ready.rely_on(harness.claims.subscriptions[0])
    turn_until(scripts[0].token, harness, timeout_s=5)


def test_a_wakeup_that_is_lost_during_a_claim_begins_another_one(
    scripts: list[PartitionScripts], harness: ClaimsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims, ready = harness.claims, harness.claims.ready
    first, second = claims.subscriptions
    claims.begin_again()
    ready.pause(second, time.monotonic() + 600)
    turn_until(lambda: claims.wakeups.groups and claims.wakeups.groups[0].is_waiting, harness)
    group, join = claims.wakeups.groups[0], claims.wakeups.join

    def lose_wakeup(subscription: Subscription) -> WakeupListener:
        # The claim of the first queue has found nothing, and its answer is not read yet.
        scripts[0].push("a")
        wait_until(group.connection.has_unread_input)
        return join(subscription)

    monkeypatch.setattr(claims.wakeups, "join", lose_wakeup)
    ready.backing_off.clear()
    ready.wake(second)
    ready.wake(first)
    turn_until(lambda: harness.got == ["a"], harness, timeout_s=5)
    assert second.waits is first.waits is group


def make_limited(scripts: list[PartitionScripts]) -> None:
    """Limit the concurrency of all tenants."""
    for each in scripts:
        each.partition.set_default_quota(make_quota(concurrency=50)).run(each.client)


def make_longer(harness: ClaimsHarness, subscription: Subscription) -> None:
    """Let the back-off last longer than the test."""
    subscription.backoff_until, subscription.timer_at = time.monotonic() + 600, float("inf")
    harness.claims.ready.plan(subscription)
