"""The parts of a coordinator between processes: leases, owners, wake-ups."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.dedup.machine import HeldDedupLock, Verdict
from celery_dq.other_brokers.redis_coordinator import DedupLockHeartbeat, RedisCoordinator
from celery_dq.testing.waiting import wait_until
from tests.dedup.conftest import SCRIPTS, redis_coordinator
from tests.doubles.thread_limit import no_more_threads


def test_all_keys_are_in_one_slot(client: Any) -> None:
    one = redis_coordinator(client)
    one.enqueue("a{b}c", "a")
    tags = {key.split(b"{")[1].split(b"}")[0] for key in client.keys("*")}
    assert tags == {b"online/dedup"}
    assert one.keys() == ["a{b}c"]


def test_every_script_has_a_contract() -> None:
    for name in SCRIPTS.names():
        assert SCRIPTS[name].contract.guarantee


def subscribed(client: Any, *owners: RedisCoordinator) -> Any:
    """Listen to the wake-ups of these owners."""
    reported = client.pubsub(ignore_subscribe_messages=True)
    reported.subscribe(*(each.channel for each in owners))
    wait_until(lambda: client.pubsub_numsub(owners[-1].channel)[0][1] == 1)
    return reported


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
    reported = subscribed(client, two, three)
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
    reported = subscribed(client, two)
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


def test_a_heartbeat_begins_after_its_thread_could_not_start(client: Any) -> None:
    coordinator = redis_coordinator(client)
    turns: list[bool] = []
    heartbeat = DedupLockHeartbeat(
        coordinator, 3600.0, lambda: turns.append(True), print, lambda: client, print, lambda: None
    )
    with no_more_threads(), pytest.raises(RuntimeError):
        heartbeat.start()
    heartbeat.start()
    wait_until(lambda: turns, 10)
    heartbeat.stop()


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
