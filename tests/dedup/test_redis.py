"""The parts of a coordinator between processes: leases, owners, wake-ups."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.dedup.machine import HeldDedupLock, Verdict
from celery_dq.other_brokers.redis_coordinator import DedupLockHeartbeat
from celery_dq.testing.waiting import wait_until
from tests.dedup.conftest import SCRIPTS, redis_coordinator

KEY = "k"


def fall_silent(client: Any, *holdings: HeldDedupLock) -> None:
    """Renew for w1 a last time, with a lease that ends soon, independently of the test's speed so far."""
    assert all(redis_coordinator(client, "w1", lease=0.05).renew(holdings))


def test_a_silent_owner_loses_its_calls(client: Any) -> None:
    dead, living = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    gone = dead.enqueue(KEY, "a")
    assert living.enqueue(KEY, "b").verdict is Verdict.BLOCK
    fall_silent(client, HeldDedupLock(KEY, "a", gone.token))
    token = wait_until(lambda: living.start(KEY, "b") or 0)
    assert not dead.finish(KEY, "a", gone.token)
    assert dead.renew([HeldDedupLock(KEY, "a", gone.token)]) == [False]
    assert living.finish(KEY, "b", token)


def test_a_redelivered_task_comes_in_the_place_of_the_lost_one(client: Any) -> None:
    dead, living = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    gone = dead.enqueue(KEY, "t/1", task="t")
    living.enqueue(KEY, "u/1", task="u")
    assert living.enqueue(KEY, "t/2", task="t").verdict is Verdict.ACCEPT
    fall_silent(client, HeldDedupLock(KEY, "t/1", gone.token))
    assert wait_until(lambda: living.start(KEY, "t/2"))
    assert living.start(KEY, "u/1") == 0


def test_renewing_keeps_a_short_lease(client: Any) -> None:
    lease_s = 2.5
    short, heartbeat = redis_coordinator(client, "w1", lease=lease_s), redis_coordinator(client, "w1")
    token, other = short.enqueue(KEY, "a").token, redis_coordinator(client, "w2")
    # From here on the machine may stand still for any time.
    assert heartbeat.renew([HeldDedupLock(KEY, "a", token)]) == [True]
    other.enqueue(KEY, "b")

    def outlived() -> bool:
        assert other.start(KEY, "b") == 0
        now = heartbeat.inspect(KEY)
        assert now is not None
        assert now.head is not None
        return now.head.age > lease_s

    wait_until(outlived, 30, interval_s=0.1)
    assert heartbeat.renew([HeldDedupLock(KEY, "a", token)]) == [True]
    assert heartbeat.finish(KEY, "a", token)


def test_a_lease_outlives_the_shorter_one_of_a_waiting_call(client: Any) -> None:
    long, short = redis_coordinator(client, "w1"), redis_coordinator(client, "w2", lease=0.05)
    token = long.enqueue(KEY, "a").token
    assert short.enqueue(KEY, "b").verdict is Verdict.BLOCK

    def tail_is_overdue() -> bool:
        now = long.inspect(KEY)
        assert now is not None
        assert now.tail is not None
        return now.tail.lease < 0

    wait_until(tail_is_overdue)
    assert short.start(KEY, "b") is None
    assert long.finish(KEY, "a", token)


def test_nothing_is_left_when_all_die(client: Any) -> None:
    dead = redis_coordinator(client, "w1", lease=0.05)
    dead.enqueue(KEY, "a")
    dead.enqueue(KEY, "b")
    wait_until(lambda: client.keys("*lock*") == [])


def test_the_owner_is_woken_and_no_other(client: Any) -> None:
    one, two = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    reported = client.pubsub(ignore_subscribe_messages=True)
    reported.subscribe(one.channel, two.channel)
    wait_until(lambda: client.pubsub_numsub(two.channel)[0][1] == 1)
    token = one.enqueue(KEY, "a").token
    two.enqueue(KEY, "b")
    one.finish(KEY, "a", token)
    one.enqueue("other", "c")
    received = []

    def receive() -> bool:
        message = reported.get_message(timeout=0.05)
        if message is not None:
            received.append((message["channel"].decode(), message["data"].decode()))
        return bool(received)

    wait_until(receive)
    assert reported.get_message(timeout=0.05) is None
    assert received == [(two.channel, two.keys_of.dedup_lock(KEY))]
    reported.close()


def test_scripts_that_the_server_forgot(client: Any) -> None:
    one = redis_coordinator(client)
    token = one.enqueue(KEY, "a").token
    client.script_flush()
    assert one.renew([HeldDedupLock(KEY, "a", token)]) == [True]
    client.script_flush()
    assert one.finish(KEY, "a", token)


def test_all_keys_are_in_one_slot(client: Any) -> None:
    one = redis_coordinator(client)
    one.enqueue("a{b}c", "a")
    tags = {key.split(b"{")[1].split(b"}")[0] for key in client.keys("*")}
    assert tags == {b"online/dedup"}
    assert one.keys() == ["a{b}c"]


def test_every_script_has_a_contract() -> None:
    for name in SCRIPTS.names():
        assert SCRIPTS[name].contract.guarantee


@pytest.mark.parametrize("how", ["finish", "evict", "free", "withdraw", "replace"])
def test_a_follower_is_reported_when_it_is_over(client: Any, how: str) -> None:
    one, two, three = (redis_coordinator(client, f"w{number}") for number in (1, 2, 3))
    token = one.enqueue("q|k", "t/1", task="t", timeout=2.5 if how == "evict" else None).token
    covering = HeldDedupLock("q|k", "t/1", token)
    if how in ("withdraw", "replace"):
        one.enqueue("q|k", "u/1", task="u")
        covering = HeldDedupLock("q|k", "u/1", 0)
    for call in ("v/1", "w/1"):
        assert two.enqueue("q|k", call, waiting=0, follow=True).covering == covering.call
    assert three.enqueue("q|k", "x/1", waiting=0).covering == covering.call
    now = one.inspect("q|k")
    assert now is not None
    assert [each.followers for each in (now.head, now.tail) if each and each.call == covering.call] == [2]
    reported = client.pubsub(ignore_subscribe_messages=True)
    reported.subscribe(two.channel, three.channel)
    wait_until(lambda: client.pubsub_numsub(three.channel)[0][1] == 1)
    if how == "finish":
        assert one.finish(*covering)
    elif how == "free":
        assert one.free("q|k") is not None
    elif how == "withdraw":
        assert one.withdraw("q|k", covering.call)
    elif how == "replace":
        assert one.enqueue("q|k", "y/1", policy="replace").replaced == covering.call
    else:
        # The next script on the key finds that it has run too long.
        wait_until(lambda: not one.renew([covering])[0])
    message = wait_until(lambda: reported.get_message(timeout=0.05))
    assert message["channel"].decode() == two.channel
    assert reported.get_message(timeout=0.05) is None
    reported.close()


def test_a_retry_keeps_its_followers(client: Any) -> None:
    one, two = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    token = one.enqueue("q|k", "t/1", task="t").token
    two.enqueue("q|k", "v/1", waiting=0, follow=True)
    reported = client.pubsub(ignore_subscribe_messages=True)
    reported.subscribe(two.channel)
    wait_until(lambda: client.pubsub_numsub(two.channel)[0][1] == 1)
    heir = one.enqueue("q|k", "t/2", task="t")
    assert heir.verdict is Verdict.ACCEPT
    assert one.finish("q|k", "t/1", token)
    assert reported.get_message(timeout=0.05) is None
    token = one.start("q|k", "t/2") or 0
    assert one.finish("q|k", "t/2", token)
    assert wait_until(lambda: reported.get_message(timeout=0.05))
    reported.close()


def test_a_heartbeat_learns_of_the_end_long_before_it_renews(client: Any) -> None:
    one, two = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    token = one.enqueue("q|k", "t/1").token
    two.enqueue("q|k", "v/1", waiting=0, follow=True)
    turns: list[bool] = []
    heartbeat = DedupLockHeartbeat(
        two, 3600.0, lambda: turns.append(True), print, lambda: client, print, lambda: None
    )
    heartbeat.start()
    wait_until(lambda: turns and client.pubsub_numsub(two.channel)[0][1] == 1)
    assert one.finish("q|k", "t/1", token)
    # Two turns come from the start and from the subscription; the next would come in twenty minutes.
    wait_until(lambda: len(turns) > 2, 30)
    heartbeat.stop()
    assert heartbeat._thread is not None
    assert not heartbeat._thread.is_alive()


def test_another_delivery_of_a_declined_task_is_declined_in_favour_of_the_same_task(client: Any) -> None:
    one, two = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    head = one.enqueue("q|k", "t/1", task="t").token
    one.enqueue("q|k", "u/1", task="u", follow=True)
    assert one.enqueue("q|k", "v/1", task="v", follow=True).covering == "u/1"
    assert one.finish("q|k", "t/1", head)
    token = one.start("q|k", "u/1")
    # It began after the declined call, so another delivery of that call need not wait behind it.
    again = two.enqueue("q|k", "v/2", task="v", follow=True)
    assert (again.verdict, again.covering, again.left) == (Verdict.DECLINE, "u/1", False)
    assert one.finish("q|k", "u/1", token or 0)
    later = two.enqueue("q|k", "v/3", task="v", follow=True)
    assert (later.verdict, later.covering, later.left) == (Verdict.DECLINE, "u", True)
    two.forget_covered("v")
    assert two.enqueue("q|k", "v/4", task="v", follow=True).verdict is Verdict.ACCEPT


def test_a_declined_task_is_remembered_for_a_day(client: Any) -> None:
    one = redis_coordinator(client)
    one.enqueue("q|k", "s/1", task="s")
    one.enqueue("q|k", "t/1", task="t")
    one.enqueue("q|k", "v/1", task="v")
    assert client.keys("*declined*") == []
    one.enqueue("q|k", "v/1", task="v", follow=True)
    one.remember_covered("w", "t")
    for task in "vw":
        assert client.get(one.keys_of.declined(task)) == b"t"
        assert 86_000 < client.ttl(one.keys_of.declined(task)) <= 86_400
