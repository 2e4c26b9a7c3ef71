"""There is a token when something may be served, or when nobody keeps the next appointment."""

from __future__ import annotations

import pytest

from celery_dq.testing.waiting import wait_until
from tests.lua.desk import LEASE_MS, Desk

SECOND_US = 1_000_000


def delay(desk: Desk, task_id: str, seconds: float) -> None:
    desk.push(task_id, due_us=desk.now_us() + int(seconds * SECOND_US))


def test_push_wakes_once(desk: Desk) -> None:
    desk.push("a")
    desk.push("b")
    assert desk.client.llen(desk.keys.wake) == 1


def test_token_goes_with_the_last_message(desk: Desk) -> None:
    desk.push("a")
    assert desk.claim(5).more is False
    assert not desk.token()


def test_what_a_claim_leaves_wakes_the_next(desk: Desk) -> None:
    desk.push("a", "b")
    assert desk.take_token()
    desk.claim(1)
    assert desk.token()


@pytest.mark.parametrize(
    ("quota", "place"),
    [({"rate": 0.001}, "throttled"), ({"concurrency": 1}, "limited"), ({"paused": True}, "parked")],
)
def test_push_to_a_tenant_that_may_not_be_served_wakes_nobody(
    desk: Desk, quota: dict[str, float], place: str
) -> None:
    desk.set_quota("t", **quota)
    desk.push("a", "b", tenant="t")
    desk.claim(5)
    desk.claim(5)
    assert desk.place("t") == place
    assert not desk.token()
    for i in range(3):
        desk.push(f"c{i}", tenant="t")
    assert not desk.token()


def test_claim_that_found_nothing_keeps_the_appointment(desk: Desk) -> None:
    delay(desk, "a", 30)
    assert desk.take_token()
    claimed = desk.claim(5)
    assert claimed.appointment_s == pytest.approx(30, abs=5)
    assert not desk.token()
    assert desk.claim(5, "c2").appointment_s is None
    assert desk.claim(5).appointment_s == pytest.approx(30, abs=5)


def test_later_appointment_wakes_nobody_an_earlier_one_does(desk: Desk) -> None:
    delay(desk, "a", 30)
    desk.claim(5)
    delay(desk, "b", 50)
    assert not desk.token()
    delay(desk, "c", 10)
    assert desk.take_token()
    assert desk.claim(5, "c2").appointment_s == pytest.approx(7, abs=5)
    assert desk.claim(5, "c1").appointment_s is None


def test_who_gets_work_passes_the_appointment_on(desk: Desk) -> None:
    delay(desk, "later", 30)
    desk.claim(5)
    desk.push("a")
    assert desk.take_token()
    claimed = desk.claim(5)
    assert [entry.id for entry in claimed.entries] == ["a"]
    assert claimed.appointment_s is None
    assert desk.take_token()
    assert desk.claim(5, "c2").appointment_s == pytest.approx(30, abs=5)


def test_hold_keeps_it_in_spite_of_work(desk: Desk) -> None:
    delay(desk, "later", 30)
    desk.push("a")
    claimed = desk.claim(5, hold=True)
    assert len(claimed.entries) == 1
    assert claimed.appointment_s == pytest.approx(30, abs=5)
    assert not desk.token()


def test_appointment_of_a_lost_consumer_is_taken_over(desk: Desk) -> None:
    delay(desk, "a", 30)
    desk.claim(5)
    desk.lose()
    desk.reap()
    assert desk.take_token()
    assert desk.claim(5, "c2").appointment_s is not None


def test_appointment_of_one_who_resigns_is_taken_over(desk: Desk) -> None:
    delay(desk, "a", 30)
    desk.claim(5)
    desk.partition.resign("c1").run(desk.client)
    assert desk.take_token()


def test_who_nudges_keeps_its_appointment_no_more(desk: Desk) -> None:
    delay(desk, "a", 0.1)
    delay(desk, "b", 30)
    assert desk.claim(5, "c1").appointment_s is not None
    desk.take_token()
    wait_until(lambda: desk.partition.nudge("c1").run(desk.client), 5)
    assert desk.take_token()
    claimed = desk.claim(5, "c2", hold=True)
    assert [entry.id for entry in claimed.entries] == ["a"]
    assert claimed.appointment_s == pytest.approx(30, abs=5)
    assert not desk.token()


def test_who_nudges_before_its_time_hands_the_appointment_on(desk: Desk) -> None:
    delay(desk, "a", 30)
    desk.claim(5, "c1")
    assert desk.partition.nudge("c1").run(desk.client) is False
    assert desk.take_token()
    assert desk.claim(5, "c2").appointment_s == pytest.approx(30, abs=5)


@pytest.mark.parametrize("who", ["c2", ""])
def test_a_nudge_takes_no_appointment_from_others(desk: Desk, who: str) -> None:
    delay(desk, "a", 30)
    desk.claim(5, "c1")
    desk.partition.nudge(who).run(desk.client)
    assert not desk.token()
    assert desk.state("appt") > desk.now_us()
    assert desk.client.hget(desk.keys.state, "appt_owner") == b"c1"


def test_an_appointment_in_the_past_counts_for_nothing(desk: Desk) -> None:
    """Its owner lives, and is full or has forgotten it; somebody else was served meanwhile."""
    delay(desk, "a", 0.1)
    delay(desk, "b", 30)
    desk.claim(5, "c1")
    wait_until(lambda: desk.now_us() > desk.state("appt"), interval_s=0.02)
    claimed = desk.claim(5, "c2", hold=True)
    assert [entry.id for entry in claimed.entries] == ["a"]
    assert claimed.appointment_s == pytest.approx(30, abs=5)
    # Its owner comes after all.
    assert desk.claim(5, "c1").appointment_s is None


def test_a_heartbeat_replaces_an_appointment_in_the_past(desk: Desk) -> None:
    delay(desk, "a", 0.1)
    delay(desk, "b", 30)
    desk.claim(5, "c1")
    desk.client.zrem(desk.keys.delayed, "a")  # cancelled, and nobody was told
    wait_until(lambda: desk.now_us() > desk.state("appt"), interval_s=0.02)
    desk.partition.renew("c2", lease_ms=LEASE_MS).run(desk.client)
    assert desk.token()


def test_heartbeat_finds_what_nobody_was_woken_for(desk: Desk) -> None:
    delay(desk, "a", 30)
    desk.claim(5)
    desk.client.zadd(desk.keys.delayed, {"a": 5})
    desk.partition.renew("c2", lease_ms=LEASE_MS).run(desk.client)
    assert desk.token()


def test_heartbeat_replaces_a_token_that_died_with_its_taker(desk: Desk) -> None:
    desk.push("a")
    desk.take_token()
    desk.partition.renew("c2", lease_ms=LEASE_MS).run(desk.client)
    assert desk.token()


def test_throttled_tenant_makes_an_appointment(desk: Desk) -> None:
    desk.set_quota("t", 0.1)
    desk.push("a", "b", tenant="t")
    desk.claim(5)
    assert desk.take_token()
    assert desk.claim(5).appointment_s == pytest.approx(7, abs=5)


def test_appointment_is_due_when_it_says(desk: Desk) -> None:
    delay(desk, "a", 2.5)  # so that the claim comes before
    assert desk.claim(5).appointment_s == pytest.approx(1.3, abs=1.29)
    wait_until(lambda: desk.partition.nudge().run(desk.client), 30)
    assert desk.token()
    assert desk.take() == ["a"]


def test_cancelled_appointment_leaves_no_token(desk: Desk) -> None:
    delay(desk, "a", 30)
    desk.claim(5)
    desk.partition.purge().run(desk.client)
    assert not desk.token()
    assert desk.claim(5).appointment_s is None
    assert not desk.token()


@pytest.mark.parametrize("change", ["finish", "release", "quota", "unpause", "reap"])
def test_whatever_makes_a_tenant_eligible_wakes(desk: Desk, change: str) -> None:
    desk.set_quota("t", concurrency=1, paused=False)
    desk.push("a", "b", tenant="t")
    tag = desk.claim(5).entries[0].tag
    if change == "unpause":
        desk.set_quota("t", paused=True)
    assert not desk.token()
    if change == "finish":
        desk.finish(tag)
    elif change == "release":
        desk.release(tag, mode="requeue")
    elif change == "quota":
        desk.set_quota("t", concurrency=2)
    elif change == "unpause":
        desk.set_quota("t")
    else:
        desk.lose()
        desk.reap()
    assert desk.token()


def test_nudge_says_whether_something_may_be_served(desk: Desk) -> None:
    nudge = desk.partition.nudge()
    assert nudge.run(desk.client) is False
    desk.push("a")
    assert nudge.run(desk.client) is True
