"""What only a coordinator between processes can get wrong: leases, owners, being told."""

from __future__ import annotations

from typing import Any

from celery_dq.dedup.coordinator import Holding
from celery_dq.dedup.machine import Verdict
from celery_dq.testing.waiting import wait_until
from tests.dedup.conftest import SCRIPTS, redis_coordinator

KEY = "k"


def test_a_silent_owner_loses_its_calls(client: Any) -> None:
    dead, living = redis_coordinator(client, "w1", lease=0.05), redis_coordinator(client, "w2")
    gone = dead.enqueue(KEY, "a")
    assert living.enqueue(KEY, "b").verdict is Verdict.BLOCK
    token = wait_until(lambda: living.start(KEY, "b"))
    assert not dead.finish(KEY, "a", gone.token)
    assert dead.renew([Holding(KEY, "a", gone.token)]) == [False]
    assert living.finish(KEY, "b", token)


def test_a_redelivered_task_comes_in_the_place_of_the_lost_one(client: Any) -> None:
    dead, living = redis_coordinator(client, "w1", lease=0.05), redis_coordinator(client, "w2")
    dead.enqueue(KEY, "t/1", task="t")
    living.enqueue(KEY, "u/1", task="u")
    assert living.enqueue(KEY, "t/2", task="t").verdict is Verdict.ACCEPT
    assert wait_until(lambda: living.start(KEY, "t/2"))
    assert living.start(KEY, "u/1") == 0


def test_renewing_keeps_a_short_lease(client: Any) -> None:
    keeper, other = redis_coordinator(client, "w1", lease=0.3), redis_coordinator(client, "w2")
    token = keeper.enqueue(KEY, "a").token
    other.enqueue(KEY, "b")
    beats = 0

    def beat() -> bool:
        nonlocal beats
        assert keeper.renew([Holding(KEY, "a", token)]) == [True]
        assert other.start(KEY, "b") == 0
        beats += 1
        return beats > 10

    wait_until(beat, interval_s=0.05)
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
