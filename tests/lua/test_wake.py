"""There is a wake-up when a message may be served, or when no consumer keeps the next look."""

from __future__ import annotations

import pytest

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.partition_replies import OutgoingRecord
from tests.lua.partition_scripts import LEASE_MS, PartitionScripts, make_keyed_record, tags_of

SECOND_US = 1_000_000


def delay(scripts: PartitionScripts, task_id: str, seconds: float) -> None:
    scripts.push(task_id, due_us=scripts.now_us() + int(seconds * SECOND_US))


def make_due(scripts: PartitionScripts, task_id: str) -> None:
    """As if the time of a delayed message, and of the look that was planned for it, had come."""
    scripts.client.zadd(scripts.keys.delayed, {task_id: 5})
    scripts.client.hset(scripts.keys.state, "next_look", 5)


@pytest.mark.parametrize(
    ("quota", "place"),
    [({"rate": 0.001}, "throttled"), ({"concurrency": 1}, "at_concurrency"), ({"paused": True}, "paused")],
)
def test_push_to_a_tenant_that_may_not_be_served_wakes_no_consumer(
    scripts: PartitionScripts, quota: dict[str, float], place: str
) -> None:
    scripts.set_quota("t", **quota)
    scripts.push("a", "b", tenant="t")
    scripts.claim(5)
    scripts.claim(5)
    assert scripts.place("t") == place
    assert not scripts.token()
    for i in range(3):
        scripts.push(f"c{i}", tenant="t")
    assert not scripts.token()


def test_claim_that_found_nothing_keeps_the_next_look(scripts: PartitionScripts) -> None:
    delay(scripts, "a", 30)
    assert scripts.take_token()
    claimed = scripts.claim(5)
    assert claimed.next_look_s == pytest.approx(30, abs=5)
    assert not scripts.token()
    assert scripts.claim(5, "c2").next_look_s is None
    assert scripts.claim(5).next_look_s == pytest.approx(30, abs=5)


def test_later_next_look_wakes_no_consumer_an_earlier_one_does(scripts: PartitionScripts) -> None:
    delay(scripts, "a", 30)
    scripts.claim(5)
    delay(scripts, "b", 50)
    assert not scripts.token()
    delay(scripts, "c", 10)
    assert scripts.take_token()
    assert scripts.claim(5, "c2").next_look_s == pytest.approx(7, abs=5)
    assert scripts.claim(5, "c1").next_look_s is None


def test_a_consumer_that_gets_work_passes_the_next_look_on(scripts: PartitionScripts) -> None:
    delay(scripts, "later", 30)
    scripts.claim(5)
    scripts.push("a")
    assert scripts.take_token()
    claimed = scripts.claim(5)
    assert [entry.id for entry in claimed.entries] == ["a"]
    assert claimed.next_look_s is None
    assert scripts.take_token()
    assert scripts.claim(5, "c2").next_look_s == pytest.approx(30, abs=5)


def test_a_claim_plans_the_look_for_a_message_that_waited_for_the_one_it_ends(
    scripts: PartitionScripts,
) -> None:
    def push(task_id: str, kind: str) -> None:
        record = make_keyed_record("", "k", kind, scripts.now_us())
        scripts.partition.push([OutgoingRecord(0, task_id, record)]).run(scripts.client)

    push("head", "")
    head = tags_of(scripts.claim().entries)
    push("tail", "delayed")
    assert scripts.claim(finish=head, hold=True).next_look_s is not None


def test_hold_keeps_it_in_spite_of_work(scripts: PartitionScripts) -> None:
    delay(scripts, "later", 30)
    scripts.push("a")
    claimed = scripts.claim(5, hold=True)
    assert len(claimed.entries) == 1
    assert claimed.next_look_s == pytest.approx(30, abs=5)
    assert not scripts.token()


def test_a_consumer_that_hands_over_keeps_its_next_look_no_more(scripts: PartitionScripts) -> None:
    delay(scripts, "a", 20)
    delay(scripts, "b", 30)
    assert scripts.claim(5, "c1").next_look_s is not None
    scripts.take_token()
    make_due(scripts, "a")
    assert scripts.partition.hand_over_wakeup("c1").run(scripts.client)
    assert scripts.take_token()
    claimed = scripts.claim(5, "c2", hold=True)
    assert [entry.id for entry in claimed.entries] == ["a"]
    assert claimed.next_look_s == pytest.approx(30, abs=5)
    assert not scripts.token()


def test_a_consumer_that_hands_over_before_its_time_hands_the_next_look_on(scripts: PartitionScripts) -> None:
    delay(scripts, "a", 30)
    scripts.claim(5, "c1")
    assert scripts.partition.hand_over_wakeup("c1").run(scripts.client) is False
    assert scripts.take_token()
    assert scripts.claim(5, "c2").next_look_s == pytest.approx(30, abs=5)


@pytest.mark.parametrize("who", ["c2", ""])
def test_a_handover_takes_no_next_look_from_others(scripts: PartitionScripts, who: str) -> None:
    delay(scripts, "a", 30)
    scripts.claim(5, "c1")
    scripts.partition.hand_over_wakeup(who).run(scripts.client)
    assert not scripts.token()
    assert scripts.state("next_look") > scripts.now_us()
    assert scripts.client.hget(scripts.keys.state, "next_look_owner") == b"c1"


def test_an_next_look_in_the_past_counts_for_nothing(scripts: PartitionScripts) -> None:
    """The owner of the next look lives, but is full or has forgotten it; another consumer was served."""
    delay(scripts, "a", 20)
    delay(scripts, "b", 30)
    scripts.claim(5, "c1")
    make_due(scripts, "a")
    claimed = scripts.claim(5, "c2", hold=True)
    assert [entry.id for entry in claimed.entries] == ["a"]
    assert claimed.next_look_s == pytest.approx(30, abs=5)
    # Its owner comes after all.
    assert scripts.claim(5, "c1").next_look_s is None


def test_a_heartbeat_replaces_an_next_look_in_the_past(scripts: PartitionScripts) -> None:
    delay(scripts, "a", 20)
    delay(scripts, "b", 30)
    scripts.claim(5, "c1")
    make_due(scripts, "a")
    scripts.client.zrem(scripts.keys.delayed, "a")  # cancelled, without a wake-up
    scripts.partition.heartbeat("c2", lease_ms=LEASE_MS).run(scripts.client)
    assert scripts.token()


def test_throttled_tenant_makes_an_next_look(scripts: PartitionScripts) -> None:
    scripts.set_quota("t", 0.1)
    scripts.push("a", "b", tenant="t")
    scripts.claim(5)
    assert scripts.take_token()
    assert scripts.claim(5).next_look_s == pytest.approx(7, abs=5)


def test_next_look_is_due_when_it_reports(scripts: PartitionScripts) -> None:
    delay(scripts, "a", 2.5)  # so that the claim comes before
    assert scripts.claim(5).next_look_s == pytest.approx(1.3, abs=1.29)
    wait_until(lambda: scripts.partition.hand_over_wakeup().run(scripts.client), 30)
    assert scripts.token()
    assert scripts.take() == ["a"]


def test_cancelled_next_look_leaves_no_token(scripts: PartitionScripts) -> None:
    delay(scripts, "a", 30)
    scripts.claim(5)
    scripts.partition.purge().run(scripts.client)
    assert not scripts.token()
    assert scripts.claim(5).next_look_s is None
    assert not scripts.token()


@pytest.mark.parametrize("change", ["finish", "release", "quota", "unpause", "reap"])
def test_all_that_makes_a_tenant_eligible_wakes(scripts: PartitionScripts, change: str) -> None:
    scripts.set_quota("t", concurrency=1, paused=False)
    scripts.push("a", "b", tenant="t")
    tag = scripts.claim(5).entries[0].tag
    if change == "unpause":
        scripts.set_quota("t", paused=True)
    assert not scripts.token()
    if change == "finish":
        scripts.finish(tag)
    elif change == "release":
        scripts.release(tag, mode="requeue")
    elif change == "quota":
        scripts.set_quota("t", concurrency=2)
    elif change == "unpause":
        scripts.set_quota("t")
    else:
        scripts.lose()
        scripts.reap()
    assert scripts.token()


def test_the_end_of_a_message_wakes_a_consumer_for_a_pause_that_ends_by_itself(
    scripts: PartitionScripts,
) -> None:
    """A worker that was busy at the time of the end gets its wake-up from its ack."""
    scripts.push("runs", tenant="other")
    scripts.push("waits", tenant="paused")
    scripts.partition.pause("paused", for_us=60_000_000).run(scripts.client)
    entry = scripts.claim().entries[0]
    scripts.client.delete(scripts.keys.wake)  # it was taken, and the look was not planned
    scripts.finish(entry.tag)
    assert scripts.client.llen(scripts.keys.wake) == 1
