"""A follower gets the end of a call that ran, and only a call with others behind it is evicted."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.message_record import DedupSection
from celery_dq.transport.partition_replies import OutgoingRecord, PushReply
from tests.lua.partition_scripts import LEASE_MS, PartitionScripts, make_keyed_record, make_record, tags_of

#: So many may follow one message.
MOST = 1000


def push_all(scripts: PartitionScripts, tasks: Sequence[str], **options: Any) -> list[PushReply]:
    section = DedupSection("k", **options).pack()
    record = bytearray(make_record())
    record[2] |= 2
    packed = bytes(record) + section + struct.pack(">H", len(section))
    return scripts.partition.push([OutgoingRecord(0, task, packed) for task in tasks]).run(scripts.client)


def push(scripts: PartitionScripts, task: str, **options: Any) -> PushReply:
    return push_all(scripts, [task], **options)[0]


def crowd(scripts: PartitionScripts, name: str, count: int = MOST) -> None:
    pushed = push_all(scripts, [f"{name} {n}" for n in range(count)], follow=True, awaited=True)
    assert {each.status for each in pushed} == {"following"}


def test_followers_of_a_run_that_is_evicted_follow_its_retry(scripts: PartitionScripts) -> None:
    push(scripts, "first")
    assert push(scripts, "follower", follow=True, awaited=True).status == "following"
    (run,) = scripts.claim().entries
    push(scripts, "retry", continues=(run.id, int(run.claim)))
    assert scripts.partition.evict("", "k").run(scripts.client) == "first"
    assert scripts.finish(run.tag) == 0
    # The run ended in a retry, and no call waits for that.
    (retry,) = scripts.claim(4).entries
    assert (retry.id, retry.reason) == ("retry", "")
    scripts.finish(retry.tag)
    assert [(each.id, each.reason) for each in scripts.claim(4).entries] == [("follower", "covered:retry")]


def test_followers_of_a_call_without_a_run_follow_the_running_one(scripts: PartitionScripts) -> None:
    push(scripts, "first")
    push(scripts, "follower", follow=True, awaited=True)
    (first,) = scripts.claim().entries
    scripts.partition.evict("", "k").run(scripts.client)
    push(scripts, "second")
    # It lost its key and did not run: the second one covers it and the calls that waited for it.
    assert scripts.release(first.tag) == 0
    (second,) = scripts.claim(4).entries
    assert (second.id, second.reason) == ("second", "")
    scripts.finish(second.tag)
    assert [(each.id, each.reason) for each in scripts.claim(4).entries] == [("follower", "covered:second")]


def test_all_followers_are_moved_however_many_there_are(scripts: PartitionScripts) -> None:
    push(scripts, "first")
    crowd(scripts, "early")
    (first,) = scripts.claim().entries
    scripts.partition.evict("", "k").run(scripts.client)
    push(scripts, "second")
    crowd(scripts, "late")
    scripts.release(first.tag)  # its followers wait for the second one now
    assert push(scripts, "third", replace=True).replaced == "second"
    assert scripts.client.llen(scripts.keys.followers("third")) == 2 * MOST
    assert not scripts.client.exists(scripts.keys.followers("second"))
    (third,) = scripts.claim().entries
    scripts.finish(third.tag)
    assert scripts.client.zcard(scripts.keys.discards) == 2 * MOST
    assert set(scripts.client.hvals(scripts.keys.reasons)) == {b"covered:third"}
    assert not scripts.client.exists(scripts.keys.following)


def test_a_replaced_call_does_not_follow_where_too_many_do(scripts: PartitionScripts) -> None:
    push(scripts, "first", awaited=True)
    crowd(scripts, "follower", MOST - 1)
    assert push(scripts, "second", replace=True, awaited=True).replaced == "first"
    third = push(scripts, "third", replace=True, awaited=True)
    assert (third.status, third.covering, third.replaced) == ("refused", "second", "")
    assert scripts.take(4) == ["second"]
    assert scripts.client.llen(scripts.keys.followers("second")) == MOST
    assert not scripts.client.hexists(scripts.keys.messages, "third")


def test_a_replaced_one_that_is_not_awaited_takes_no_room(scripts: PartitionScripts) -> None:
    push(scripts, "first")
    crowd(scripts, "follower")
    assert push(scripts, "second", replace=True).replaced == "first"
    assert scripts.client.llen(scripts.keys.followers("second")) == MOST


def test_the_followers_of_a_run_and_its_retry_are_counted_together(scripts: PartitionScripts) -> None:
    push(scripts, "first")
    crowd(scripts, "early", MOST - 1)
    (run,) = scripts.claim().entries
    push(scripts, "retry", continues=(run.id, int(run.claim)))
    crowd(scripts, "late", 1)
    assert push(scripts, "one more", follow=True, awaited=True).status == "refused"
    scripts.finish(run.tag)
    assert scripts.client.llen(scripts.keys.followers("retry")) == MOST


def test_a_run_whose_tail_was_cancelled_is_not_evicted(scripts: PartitionScripts) -> None:
    push(scripts, "first", timeout_us=1)
    entries = scripts.claim().entries
    push(scripts, "tail")
    scripts.partition.cancel(["tail"], tombstone_ttl_ms=0).run(scripts.client)
    assert scripts.client.exists(scripts.keys.evictions) == 0
    assert [(each.id, each.reason) for each in scripts.claim(4).entries] == [("tail", "cancelled")]
    assert push(scripts, "second").covering == "first"
    assert scripts.finish(*tags_of(entries)) == 0


def test_a_message_taken_by_name_runs(scripts: PartitionScripts) -> None:
    push(scripts, "first")
    (taken,) = scripts.partition.take("mover", ["first"], lease_ms=LEASE_MS).run(scripts.client)
    # It is held, so it may have been read: the latest call must wait, and not take its place and its record.
    latest = push(scripts, "latest", replace=True)
    assert (latest.status, latest.replaced) == ("blocked", "")
    assert scripts.client.hexists(scripts.keys.messages, "first")
    assert scripts.take(4) == []
    assert scripts.finish(taken.tag, consumer="mover") == 0
    assert scripts.take(4) == ["latest"]


def test_a_message_taken_by_name_and_released_waits(scripts: PartitionScripts) -> None:
    push(scripts, "first")
    (taken,) = scripts.partition.take("mover", ["first"], lease_ms=LEASE_MS).run(scripts.client)
    scripts.release(taken.tag, mode="requeue", consumer="mover")
    assert push(scripts, "second").covering == "first"
    assert scripts.take(4) == ["first"]


@pytest.mark.parametrize("returns_by", ["release", "reap"])
def test_the_eviction_of_a_head_is_armed_again_when_it_is_claimed_again(
    scripts: PartitionScripts, returns_by: str
) -> None:
    timeout_us = 200_000
    push(scripts, "head", timeout_us=timeout_us)
    (first,) = scripts.claim().entries
    push(scripts, "tail")
    armed = scripts.client.zscore(scripts.keys.evictions, "0:k")
    if returns_by == "release":
        scripts.release(first.tag)
    else:
        scripts.lose()
        assert scripts.reap() == 1
    # No run has the key, so none is evicted, however long the head waits.
    assert not scripts.client.exists(scripts.keys.evictions)
    (again,) = scripts.claim(consumer="c2").entries
    claimed_us = scripts.now_us()
    assert again.id == "head"
    armed_again = scripts.client.zscore(scripts.keys.evictions, "0:k")
    assert armed < armed_again <= claimed_us + timeout_us
    wait_until(lambda: scripts.now_us() > armed_again, 30)
    # A claim evicts an overdue run, and the tail takes the place of the head.
    assert scripts.take(4, consumer="c3") == ["tail"]
    assert scripts.finish(again.tag, consumer="c2") == 0
    assert not scripts.client.exists(scripts.keys.evictions)


def test_a_declined_call_stays_declined_when_its_push_is_repeated(scripts: PartitionScripts) -> None:
    push(scripts, "first")
    for expected in ("declined", "seen"):
        again = OutgoingRecord(1, "second", make_keyed_record("", "k", "", 0))
        (pushed,) = scripts.partition.push([again], producer="p").run(scripts.client)
        assert pushed.status == expected
        # The one that covered it has ended when the repetition comes: the key is free.
        scripts.finish(*tags_of(scripts.claim().entries))
    assert scripts.take() == []


def test_the_latest_replaces_the_waiting_call_behind_a_returned_one(scripts: PartitionScripts) -> None:
    push(scripts, "first")
    (first,) = scripts.claim().entries
    assert push(scripts, "second").status == "blocked"
    scripts.release(first.tag, mode="requeue")
    third = push(scripts, "third", replace=True)
    assert (third.status, third.replaced) == ("blocked", "second")
    ran = []
    while entries := scripts.claim(4).entries:
        ran += [entry.id for entry in entries]
        scripts.finish(*tags_of(entries))
    assert ran == ["first", "third"]


def test_a_delayed_one_that_is_replaced_and_awaited_follows_and_does_not_run(
    scripts: PartitionScripts,
) -> None:
    record = make_keyed_record("", "k", "delayed", scripts.now_us(), awaited=True)
    scripts.partition.push([OutgoingRecord(0, "first", record)]).run(scripts.client)
    assert push(scripts, "second", replace=True).replaced == "first"
    # As if its time came.
    scripts.client.zadd(scripts.keys.delayed, {"first": 1}, xx=True)
    (second,) = scripts.claim(4).entries
    scripts.finish(second.tag)
    assert [(each.id, each.reason) for each in scripts.claim(4).entries] == [("first", "covered:second")]
