"""What only a coordinator between processes can get wrong: leases, owners, being told."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.dedup.coordinator import Holding
from celery_dq.dedup.keeper import Keeper
from celery_dq.dedup.machine import Verdict
from celery_dq.testing.waiting import wait_until
from tests.dedup.conftest import SCRIPTS, redis_coordinator

KEY = "k"


def fall_silent(client: Any, *holdings: Holding) -> None:
    """The last renewal of w1: its lease ends in a moment, however long the test has taken up to here."""
    assert all(redis_coordinator(client, "w1", lease=0.05).renew(holdings))


def test_a_silent_owner_loses_its_calls(client: Any) -> None:
    dead, living = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    gone = dead.enqueue(KEY, "a")
    assert living.enqueue(KEY, "b").verdict is Verdict.BLOCK
    fall_silent(client, Holding(KEY, "a", gone.token))
    token = wait_until(lambda: living.start(KEY, "b") or 0)
    assert not dead.finish(KEY, "a", gone.token)
    assert dead.renew([Holding(KEY, "a", gone.token)]) == [False]
    assert living.finish(KEY, "b", token)


def test_a_redelivered_task_comes_in_the_place_of_the_lost_one(client: Any) -> None:
    dead, living = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    gone = dead.enqueue(KEY, "t/1", task="t")
    living.enqueue(KEY, "u/1", task="u")
    assert living.enqueue(KEY, "t/2", task="t").verdict is Verdict.ACCEPT
    fall_silent(client, Holding(KEY, "t/1", gone.token))
    assert wait_until(lambda: living.start(KEY, "t/2"))
    assert living.start(KEY, "u/1") == 0


def test_renewing_keeps_a_short_lease(client: Any) -> None:
    lease_s = 2.5
    short, keeper = redis_coordinator(client, "w1", lease=lease_s), redis_coordinator(client, "w1")
    token, other = short.enqueue(KEY, "a").token, redis_coordinator(client, "w2")
    # However long the machine stands still from here on.
    assert keeper.renew([Holding(KEY, "a", token)]) == [True]
    other.enqueue(KEY, "b")

    def outlived() -> bool:
        assert other.start(KEY, "b") == 0
        now = keeper.inspect(KEY)
        assert now is not None
        assert now.head is not None
        return now.head.age > lease_s

    wait_until(outlived, 30, interval_s=0.1)
    assert keeper.renew([Holding(KEY, "a", token)]) == [True]
    assert keeper.finish(KEY, "a", token)


def test_nothing_is_left_when_all_die(client: Any) -> None:
    dead = redis_coordinator(client, "w1", lease=0.05)
    dead.enqueue(KEY, "a")
    dead.enqueue(KEY, "b")
    wait_until(lambda: client.keys("*claim*") == [])


def test_the_owner_is_told_and_nobody_else(client: Any) -> None:
    one, two = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    told = client.pubsub(ignore_subscribe_messages=True)
    told.subscribe(one.channel, two.channel)
    wait_until(lambda: client.pubsub_numsub(two.channel)[0][1] == 1)
    token = one.enqueue(KEY, "a").token
    two.enqueue(KEY, "b")
    one.finish(KEY, "a", token)
    one.enqueue("other", "c")
    heard = []

    def hear() -> bool:
        message = told.get_message(timeout=0.05)
        if message is not None:
            heard.append((message["channel"].decode(), message["data"].decode()))
        return bool(heard)

    wait_until(hear)
    assert told.get_message(timeout=0.05) is None
    assert heard == [(two.channel, two.keys_of.claim(KEY))]
    told.close()


def test_scripts_that_the_server_forgot(client: Any) -> None:
    one = redis_coordinator(client)
    token = one.enqueue(KEY, "a").token
    client.script_flush()
    assert one.renew([Holding(KEY, "a", token)]) == [True]
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
def test_who_follows_is_told_when_it_is_over(client: Any, how: str) -> None:
    one, two, three = (redis_coordinator(client, f"w{number}") for number in (1, 2, 3))
    token = one.enqueue("q|k", "t/1", task="t", timeout=2.5 if how == "evict" else None).token
    covering = Holding("q|k", "t/1", token)
    if how in ("withdraw", "replace"):
        one.enqueue("q|k", "u/1", task="u")
        covering = Holding("q|k", "u/1", 0)
    for call in ("v/1", "w/1"):
        assert two.enqueue("q|k", call, waiting=0, follow=True).covering == covering.call
    assert three.enqueue("q|k", "x/1", waiting=0).covering == covering.call
    now = one.inspect("q|k")
    assert now is not None
    assert [each.followers for each in (now.head, now.tail) if each and each.call == covering.call] == [2]
    told = client.pubsub(ignore_subscribe_messages=True)
    told.subscribe(two.channel, three.channel)
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
        # Whoever looks next finds that it has run too long.
        wait_until(lambda: not one.renew([covering])[0])
    message = wait_until(lambda: told.get_message(timeout=0.05))
    assert message["channel"].decode() == two.channel
    assert told.get_message(timeout=0.05) is None
    told.close()


def test_a_retry_keeps_its_followers(client: Any) -> None:
    one, two = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    token = one.enqueue("q|k", "t/1", task="t").token
    two.enqueue("q|k", "v/1", waiting=0, follow=True)
    told = client.pubsub(ignore_subscribe_messages=True)
    told.subscribe(two.channel)
    wait_until(lambda: client.pubsub_numsub(two.channel)[0][1] == 1)
    heir = one.enqueue("q|k", "t/2", task="t")
    assert heir.verdict is Verdict.ACCEPT
    assert one.finish("q|k", "t/1", token)
    assert told.get_message(timeout=0.05) is None
    token = one.start("q|k", "t/2") or 0
    assert one.finish("q|k", "t/2", token)
    assert wait_until(lambda: told.get_message(timeout=0.05))
    told.close()


def test_a_keeper_hears_of_the_end_long_before_it_renews(client: Any) -> None:
    one, two = redis_coordinator(client, "w1"), redis_coordinator(client, "w2")
    token = one.enqueue("q|k", "t/1").token
    two.enqueue("q|k", "v/1", waiting=0, follow=True)
    turns: list[bool] = []
    keeper = Keeper(two, 3600.0, lambda: turns.append(True), lambda _: None, lambda: client)
    keeper.start()
    wait_until(lambda: turns and client.pubsub_numsub(two.channel)[0][1] == 1)
    assert one.finish("q|k", "t/1", token)
    # Two are of the start, and of the confirmation that it listens; the next would come in twenty minutes.
    wait_until(lambda: len(turns) > 2, 30)
    keeper.stop()
    assert keeper._thread is not None
    assert not keeper._thread.is_alive()
