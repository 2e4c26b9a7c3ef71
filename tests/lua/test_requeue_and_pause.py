"""The return of a throttled message to its old place, with the pause of its tenant."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import redis

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.partition_replies import OutgoingRecord
from tests.lua.partition_scripts import (
    HOUR_US,
    PartitionScripts,
    make_keyed_record,
    make_record,
    tags_of,
)


def extend(scripts: PartitionScripts, tenant: str, for_us: int, cause: str = "new") -> Any:
    return scripts.partition.extend_pause(tenant, for_us=for_us, cause=cause).run(scripts.client)


def pause(scripts: PartitionScripts, tenant: str, **end: int) -> Any:
    return scripts.partition.pause(tenant, **end).run(scripts.client)


def resume(scripts: PartitionScripts, tenant: str) -> Any:
    return scripts.partition.resume(tenant).run(scripts.client)


def cause_of(scripts: PartitionScripts, tenant: str) -> bytes | None:
    found: bytes | None = scripts.client.hget(scripts.keys.pause_causes, tenant)
    return found


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_throttled_message_returns_to_its_old_place(scripts: PartitionScripts, is_settled: bool) -> None:
    scripts.set_quota("t", concurrency=2)
    scripts.push("a", "b", tenant="t")
    scripts.push("z", tenant="u")
    (entry,) = scripts.claim().entries
    if is_settled:
        scripts.settle(entry.tag)
    assert scripts.requeue_and_pause(entry.tag, tenant="t") == 0
    assert (scripts.waiting("t"), scripts.slots("t"), scripts.place("t")) == (["a", "b"], 0, "paused")
    assert scripts.take(9) == ["z"]
    assert resume(scripts, "t").changed
    again = scripts.claim(9).entries
    assert [(each.id, each.deliveries, each.returned) for each in again] == [
        ("a", 0, False),
        ("b", 0, False),
    ]
    assert again[0].record == make_record("t")
    assert scripts.state("settled") == 0


def test_the_pause_of_a_throttled_message_ends_by_itself_and_wakes_no_consumer_before(
    scripts: PartitionScripts,
) -> None:
    scripts.push("a", "b", tenant="t")
    (entry,) = scripts.claim().entries
    scripts.take_token()
    scripts.requeue_and_pause(entry.tag, tenant="t", for_us=200_000)
    ends_us = scripts.client.zscore(scripts.keys.pause_ends, "t")
    assert scripts.take_token()  # a consumer has to plan the look at the end
    look_s = scripts.claim(5).next_look_s
    assert look_s is not None
    assert abs(scripts.now_us() + look_s * 1e6 - ends_us) < 50_000
    assert not scripts.token()
    wait_until(lambda: scripts.now_us() > ends_us, 30)
    assert scripts.take(5) == ["a", "b"]
    assert scripts.left_over() <= {"leases", "messages", "held:c1", "running", "wake"}


def test_a_stale_tag_pauses_nothing(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t")
    (entry,) = scripts.claim().entries
    scripts.settle(entry.tag)
    scripts.finish(entry.tag)
    assert scripts.requeue_and_pause(entry.tag, tenant="t") == 1
    assert scripts.state("stale_acks") == 1
    assert scripts.left_over() <= {"leases", "wake"}


def test_a_second_attempt_with_the_same_tag_changes_nothing(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t")
    (entry,) = scripts.claim().entries
    assert scripts.requeue_and_pause(entry.tag, tenant="t") == 0
    ends = scripts.client.zscore(scripts.keys.pause_ends, "t")
    assert scripts.requeue_and_pause(entry.tag, tenant="t", for_us=2 * HOUR_US) == 1
    assert scripts.client.zscore(scripts.keys.pause_ends, "t") == ends
    assert scripts.waiting("t") == ["a"]


def test_a_task_never_shortens_a_pause(scripts: PartitionScripts) -> None:
    longer = pause(scripts, "t", for_us=HOUR_US)
    assert extend(scripts, "t", 1_000_000) == longer._replace(changed=False)
    assert cause_of(scripts, "t") is None
    prolonged = extend(scripts, "t", 2 * HOUR_US)
    assert (prolonged.changed, prolonged.since_us) == (True, longer.since_us)
    assert prolonged.until_us > longer.until_us
    assert cause_of(scripts, "t") == b"new"
    assert extend(scripts, "t", HOUR_US, "earlier") == prolonged._replace(changed=False)
    assert cause_of(scripts, "t") == b"new"
    without_end = pause(scripts, "t")
    assert (without_end.until_us, cause_of(scripts, "t")) == (0, None)
    assert extend(scripts, "t", HOUR_US) == without_end._replace(changed=False)
    scripts.push("a", tenant="t")
    assert scripts.take() == []


def test_a_pause_that_is_over_is_replaced_with_its_cause(scripts: PartitionScripts) -> None:
    first = extend(scripts, "t", 1_000, "first")
    wait_until(lambda: scripts.now_us() > first.until_us, 30)
    second = extend(scripts, "t", 1_000, "second")
    assert (second.changed, second.since_us > first.until_us) == (True, True)
    assert cause_of(scripts, "t") == b"second"
    wait_until(lambda: scripts.now_us() > second.until_us, 30)
    scripts.reap()
    assert scripts.left_over() <= {"leases", "wake"}


def test_a_message_of_a_set_goes_to_another_resource_at_once(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="any_of(gpu-1,gpu-2)")
    (entry,) = scripts.claim().entries
    record = make_record("any_of(gpu-1,gpu-2)")
    scripts.settle(entry.tag)
    scripts.requeue_and_pause(entry.tag, record=record)
    (again,) = scripts.claim().entries
    assert {entry.resource, again.resource} == {"gpu-1", "gpu-2"}
    scripts.requeue_and_pause(again.tag, record=record)
    assert scripts.claim().entries == []
    assert {scripts.place(each) for each in ("gpu-1", "gpu-2")} == {"paused"}


def test_a_message_that_waits_alone_is_delayed(scripts: PartitionScripts) -> None:
    scripts.push("a", "b", tenant="t", priority=3)
    (entry,) = scripts.claim(consumer="c2").entries
    scripts.settle(entry.tag, consumer="c2")
    fields: dict[str, Any] = {"tenant": "t", "priority": 3, "for_us": 300_000}
    scripts.requeue_and_pause(entry.tag, consumer="c2", alone=True, **fields)
    assert scripts.take(9) == ["b"]
    ((_, due_us),) = scripts.client.zscan_iter(scripts.keys.delayed)
    assert not scripts.client.exists(scripts.keys.pauses, scripts.keys.pause_causes)
    (again,) = wait_until(lambda: scripts.claim(9).entries, 30)
    assert (again.id, again.returned) == ("a", False)
    assert again.record == make_record("t", priority=3, due_us=due_us)


def test_a_message_of_a_singleton_queue_that_waits_alone_keeps_its_place(scripts: PartitionScripts) -> None:
    scripts.partition.fence(5).run(scripts.client)
    scripts.push("a", "b", tenant="t")
    (entry,) = scripts.claim(consumer="leader@5").entries
    scripts.requeue_and_pause(entry.tag, tenant="t", consumer="leader@5", alone=True)
    first, second = scripts.claim(2, consumer="leader@5").entries
    assert (first.id, second.id) == ("a", "b")
    due_us = struct.unpack(">d", first.record[3:11])[0]
    assert abs(due_us - scripts.now_us() - HOUR_US) < HOUR_US / 60  # the leader waits until then


def test_no_pause_is_asked_for(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t")
    for _ in range(2):
        (entry,) = scripts.claim().entries
        scripts.settle(entry.tag)
        scripts.requeue_and_pause(entry.tag, tenant="t", for_us=0)
    assert scripts.take() == ["a"]
    assert not scripts.client.exists(scripts.keys.pauses, scripts.keys.pause_causes)


def test_a_cancelled_message_does_not_run_again(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t")
    (entry,) = scripts.claim().entries
    scripts.settle(entry.tag)
    scripts.partition.cancel(["a"]).run(scripts.client)
    scripts.requeue_and_pause(entry.tag, tenant="t")
    (discard,) = scripts.claim(discards=5).entries
    assert (discard.id, discard.reason) == ("a", "cancelled")


def test_a_throttled_message_keeps_its_dedup_lock(scripts: PartitionScripts) -> None:
    record = make_keyed_record("t", "key", "", scripts.now_us())

    def push(task_id: str) -> str:
        return scripts.partition.push([OutgoingRecord(0, task_id, record)]).run(scripts.client)[0].status

    assert push("a") == "accepted"
    (entry,) = scripts.claim().entries
    scripts.settle(entry.tag)
    scripts.requeue_and_pause(entry.tag, record=record)
    assert push("b") == "declined"
    resume(scripts, "t")
    (again,) = scripts.claim().entries
    assert (again.id, again.record) == ("a", record)
    scripts.finish(again.tag)
    assert push("c") == "accepted"


def test_a_fenced_consumer_requeues_nothing(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t")
    (entry,) = scripts.claim(consumer="c1@0").entries
    scripts.partition.fence(5).run(scripts.client)
    assert scripts.requeue_and_pause(entry.tag, tenant="t", consumer="c1@0") == 1
    assert not scripts.client.exists(scripts.keys.pauses)


def test_another_subject_changes_nothing(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t")
    (entry,) = scripts.claim().entries
    call = scripts.partition.requeue_and_pause("c1", entry.tag, record=make_record("t"), for_us=1)
    call.args = ("c1", "queue", *call.args[2:])
    with pytest.raises(redis.ResponseError, match="subject must be tenant or message"):
        call.run(scripts.client)
    assert scripts.waiting("t") == []


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"record": b"x"}, "record cannot be read"),
        ({"for_us": 10**16}, "cannot end"),
        ({"for_us": -1}, "cannot"),
    ],
)
def test_a_wrong_argument_changes_nothing(scripts: PartitionScripts, fields: Any, wrong: str) -> None:
    scripts.push("a", tenant="t")
    (entry,) = scripts.claim().entries
    before = scripts.snapshot()
    with pytest.raises(redis.ResponseError, match=wrong):
        scripts.requeue_and_pause(entry.tag, **fields)
    assert scripts.snapshot() == before
    assert tags_of([entry]) == [entry.tag]
