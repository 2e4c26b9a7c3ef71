"""Discards have a share of their own: they hold up no message, and no other tenant's discards."""

from __future__ import annotations

import random
import time

import pytest

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.partition_replies import DeliveryTag
from tests.lua.partition_scripts import PartitionScripts, tags_of


def fill(scripts: PartitionScripts, tenant: str, count: int, expires_us: int = 0) -> None:
    ids = [f"{tenant}{i:04d}" for i in range(count)]
    scripts.push(*ids, tenant=tenant, expires_us=expires_us)


def cancel(scripts: PartitionScripts, tenant: str) -> None:
    while scripts.partition.cancel_tenant(tenant).run(scripts.client).remaining:
        pass


def discards(scripts: PartitionScripts) -> int:
    return int(scripts.client.zcard(scripts.keys.discards))


def test_are_not_taken_by_a_call_that_takes_no_message(scripts: PartitionScripts) -> None:
    fill(scripts, "a", 3)
    cancel(scripts, "a")
    assert scripts.take(0, discards=3) == []
    assert scripts.take(1, discards=0) == []
    assert scripts.claim(1, discards=0).more is True


def test_a_tenant_that_cancels_one_after_the_other_does_not_cheat(scripts: PartitionScripts) -> None:
    fill(scripts, "a", 20)
    cancel(scripts, "a")
    taken = []
    for i in range(10):
        scripts.push(f"b{i}", tenant="b")
        cancel(scripts, "b")
        taken += [each[0] for each in scripts.take(1)]
    assert taken.count("b") == 5


def test_expired_messages_cost_their_tenant_no_turn(scripts: PartitionScripts) -> None:
    fill(scripts, "a", 100, expires_us=1)
    scripts.push("a-live", tenant="a")
    fill(scripts, "b", 100)
    for number in range(3):
        # Each claim removes 32 of them from the tenant.
        assert scripts.take(2, discards=0) == [f"b{2 * number:04d}", f"b{2 * number + 1:04d}"]
    # The tenant is behind only in turn.
    assert scripts.take(2, discards=0)[0] == "a-live"
    assert discards(scripts) == 100


def test_tags_are_collected_while_others_wait(scripts: PartitionScripts) -> None:
    for i in range(300):
        fill(scripts, f"t{i:03d}", 1)
        cancel(scripts, f"t{i:03d}")
    fill(scripts, "z", 50)
    cancel(scripts, "z")
    while discards(scripts) > 5:
        scripts.take(5)
    assert scripts.client.zcard(scripts.keys.discard_tags) == 1


#: Seconds that discards rest in these tests; the longest rest.
REST_S = 1.0


def expire(scripts: PartitionScripts, tenant: str, count: int) -> None:
    fill(scripts, tenant, count, expires_us=1)


def test_rest_after_a_claim_that_took_some(scripts: PartitionScripts) -> None:
    fill(scripts, "loud", 50)
    cancel(scripts, "loud")
    assert len(scripts.claim(1, discards=3, discard_rest_s=REST_S).entries) == 3
    claimed = scripts.claim(1, discards=3, hold=True)
    assert not claimed.entries
    assert not claimed.more
    # The consumer looks at the end of the rest, so it needs no wake-up before.
    assert claimed.next_look_s == pytest.approx(REST_S, abs=REST_S)
    assert not scripts.token()
    scripts.push("q", tenant="quiet")
    assert scripts.token()
    assert scripts.take(1, discards=3, discard_rest_s=REST_S) == ["q"]
    wait_until(lambda: scripts.take(1, discards=3) == ["loud0003", "loud0004", "loud0005"], 30)


def test_of_all_consumers_one_looks_at_the_end_of_a_rest(scripts: PartitionScripts) -> None:
    fill(scripts, "loud", 50)
    cancel(scripts, "loud")
    assert scripts.claim(1, discards=3, discard_rest_s=REST_S).next_look_s is not None
    assert scripts.claim(1, "c2", discards=3).next_look_s is None
    assert not scripts.token()
    scripts.partition.hand_over_wakeup("c1").run(scripts.client)
    assert scripts.take_token()
    assert scripts.claim(1, "c2", discards=3).next_look_s is not None


def test_consumers_share_a_rest_and_take_turns(scripts: PartitionScripts) -> None:
    fill(scripts, "loud", 50)
    cancel(scripts, "loud")
    scripts.claim(0, "c2")
    scripts.take_token()
    claimed = scripts.claim(1, discards=3, discard_rest_s=REST_S, hold=True)
    assert scripts.state("discards_at") <= scripts.now_us() + REST_S * 1e6 / 2
    # The first consumer may be busy for as long as its own rest, so it plans no look.
    assert claimed.next_look_s is None
    assert scripts.take_token()
    assert scripts.claim(1, "c2", discards=3, hold=True).next_look_s is not None


@pytest.mark.parametrize("count", [1, 8])
def test_rest_for_longer_than_redis_works_for_them(scripts: PartitionScripts, count: int) -> None:
    fill(scripts, "loud", 50)
    cancel(scripts, "loud")
    began_us = scripts.now_us()
    scripts.claim(1, discards=count, discard_rest_s=1e-6)
    assert scripts.state("discards_at") >= began_us + 250 * (count + 1)


def test_expired_messages_are_removed_during_a_rest(scripts: PartitionScripts) -> None:
    """A live message may wait behind them, and only Redis has work with them."""
    expire(scripts, "loud", 150)
    scripts.push("live", tenant="loud")
    assert len(scripts.take(4, discards=3, discard_rest_s=60.0)) == 3
    claims = [scripts.claim(4, discards=3) for _ in range(4)]
    assert not any(claim.more for claim in claims)
    assert [[entry.id for entry in claim.entries] for claim in claims] == [[], [], [], ["live"]]
    assert discards(scripts) == 150 - 3
    # Between these claims Redis has time for others.
    assert all(0 < (claim.next_look_s or 0) <= 0.002 for claim in claims[:3])


def test_a_rest_delays_no_message_of_other_tenants(scripts: PartitionScripts) -> None:
    for number in range(40):
        expire(scripts, f"loud{number}", 3)
    scripts.push("q", tenant="quiet")
    assert "q" in scripts.take(2, discards=3, discard_rest_s=60.0)
    scripts.push("r", tenant="quiet")
    assert scripts.take(2, discards=3) == ["r"]


def test_a_rest_ends_when_the_clock_goes_back(scripts: PartitionScripts) -> None:
    fill(scripts, "loud", 5)
    cancel(scripts, "loud")
    scripts.client.hset(scripts.keys.state, "discards_at", scripts.now_us() + 10**9)
    assert scripts.take(1, discards=1) == ["loud0000"]


def test_a_wake_up_comes_at_the_end_of_a_rest_that_no_consumer_watches(scripts: PartitionScripts) -> None:
    fill(scripts, "loud", 50)
    cancel(scripts, "loud")
    scripts.claim(1, discards=3, discard_rest_s=REST_S, hold=None)
    assert scripts.take_token()
    assert scripts.claim(1, "c2", discards=3).next_look_s is not None
    scripts.lose("c2")
    scripts.reap()
    assert scripts.token()


def test_a_cancellation_is_short(scripts: PartitionScripts) -> None:
    fill(scripts, "loud", 500)
    assert scripts.partition.cancel_tenant("loud").run(scripts.client).moved == 200


@pytest.mark.parametrize("seed", range(5))
def test_no_wake_up_is_lost_while_they_rest(scripts: PartitionScripts, seed: int) -> None:
    """Consumers claim only after a wake-up, at their planned look, or while there is more."""
    draw = random.Random(seed)
    looks: dict[str, float] = {}
    tags: dict[str, list[DeliveryTag]] = {"c1": [], "c2": [], "c3": []}
    ran: set[str] = set()

    def claim(consumer: str) -> None:
        more = True
        while more:
            looks.pop(consumer, None)
            claimed = scripts.claim(
                draw.choice([1, 4]),
                consumer,
                hold=draw.choice([True, False, None]),
                discards=draw.choice([1, 8]),
                discard_rest_s=draw.choice([0.001, 0.003, 0.02]),
                finish=tags[consumer],
            )
            tags[consumer] = tags_of(claimed.entries)
            ran.update(entry.id for entry in claimed.entries if not entry.reason)
            if claimed.next_look_s is not None:
                looks[consumer] = time.monotonic() + claimed.next_look_s
            more = claimed.more

    for number in range(3):
        expire(scripts, f"old{number}", 60)
        fill(scripts, f"gone{number}", 40)
        cancel(scripts, f"gone{number}")
    sent = 0
    while scripts.client.exists(scripts.keys.discards, scripts.keys.turn):
        if draw.random() < 0.2 and sent < 50:
            sent += 1
            scripts.push(f"q{sent}", tenant=f"quiet{sent % 4}")
        if scripts.take_token():
            claim(draw.choice(list(tags)))
            continue
        assert looks, "messages wait, and no consumer looks"
        consumer = min(looks, key=lambda each: looks[each])
        time.sleep(max(0.0, looks[consumer] - time.monotonic()))  # the consumer waits for its planned look
        claim(consumer)
    assert ran == {f"q{number}" for number in range(1, sent + 1)}
