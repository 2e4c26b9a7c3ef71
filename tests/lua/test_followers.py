"""Who follows a call gets the end of one that ran; and only who keeps others waiting is evicted."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from celery_dq.transport.redis.record import DedupSection
from celery_dq.transport.redis.replies import Outgoing, Pushed
from tests.lua.desk import LEASE_MS, Desk, make_record, tags_of

#: So many may follow one message.
MOST = 1000


def push_all(desk: Desk, tasks: Sequence[str], **options: Any) -> list[Pushed]:
    section = DedupSection("k", **options).pack()
    record = bytearray(make_record())
    record[2] |= 2
    packed = bytes(record) + section + struct.pack(">H", len(section))
    return desk.partition.push([Outgoing(0, task, packed) for task in tasks]).run(desk.client)


def push(desk: Desk, task: str, **options: Any) -> Pushed:
    return push_all(desk, [task], **options)[0]


def crowd(desk: Desk, name: str, count: int = MOST) -> None:
    pushed = push_all(desk, [f"{name} {n}" for n in range(count)], follow=True, awaited=True)
    assert {each.status for each in pushed} == {"following"}


def test_followers_of_a_run_that_is_evicted_follow_its_retry(desk: Desk) -> None:
    push(desk, "first")
    assert push(desk, "follower", follow=True, awaited=True).status == "following"
    (run,) = desk.claim().entries
    push(desk, "retry", continues=(run.id, int(run.claim)))
    assert desk.partition.evict("", "k").run(desk.client) == "first"
    assert desk.finish(run.tag) == 0
    # What it ended with is that it is tried again: nobody waits for that.
    (retry,) = desk.claim(4).entries
    assert (retry.id, retry.reason) == ("retry", "")
    desk.finish(retry.tag)
    assert [(each.id, each.reason) for each in desk.claim(4).entries] == [("follower", "covered:retry")]


def test_followers_of_who_need_not_run_follow_who_does(desk: Desk) -> None:
    push(desk, "first")
    push(desk, "follower", follow=True, awaited=True)
    (first,) = desk.claim().entries
    desk.partition.evict("", "k").run(desk.client)
    push(desk, "second")
    # It lost its key and did not run: the second one covers it, and whoever waited for it.
    assert desk.release(first.tag) == 0
    (second,) = desk.claim(4).entries
    assert (second.id, second.reason) == ("second", "")
    desk.finish(second.tag)
    assert [(each.id, each.reason) for each in desk.claim(4).entries] == [("follower", "covered:second")]


def test_all_who_follow_are_moved_however_many_there_are(desk: Desk) -> None:
    push(desk, "first")
    crowd(desk, "early")
    (first,) = desk.claim().entries
    desk.partition.evict("", "k").run(desk.client)
    push(desk, "second")
    crowd(desk, "late")
    desk.release(first.tag)  # who waited for it waits for the second one now
    assert push(desk, "third", replace=True).replaced == "second"
    assert desk.client.llen(desk.keys.followers("third")) == 2 * MOST
    assert not desk.client.exists(desk.keys.followers("second"))
    (third,) = desk.claim().entries
    desk.finish(third.tag)
    assert desk.client.zcard(desk.keys.discards) == 2 * MOST
    assert set(desk.client.hvals(desk.keys.reasons)) == {b"covered:third"}
    assert not desk.client.exists(desk.keys.following)


def test_who_is_replaced_does_not_follow_where_too_many_do(desk: Desk) -> None:
    push(desk, "first", awaited=True)
    crowd(desk, "follower", MOST - 1)
    assert push(desk, "second", replace=True, awaited=True).replaced == "first"
    third = push(desk, "third", replace=True, awaited=True)
    assert (third.status, third.covering, third.replaced) == ("refused", "second", "")
    assert desk.take(4) == ["second"]
    assert desk.client.llen(desk.keys.followers("second")) == MOST
    assert not desk.client.hexists(desk.keys.messages, "third")


def test_a_replaced_one_that_nobody_awaits_takes_no_room(desk: Desk) -> None:
    push(desk, "first")
    crowd(desk, "follower")
    assert push(desk, "second", replace=True).replaced == "first"
    assert desk.client.llen(desk.keys.followers("second")) == MOST


def test_who_follows_a_run_and_its_retry_is_counted_together(desk: Desk) -> None:
    push(desk, "first")
    crowd(desk, "early", MOST - 1)
    (run,) = desk.claim().entries
    push(desk, "retry", continues=(run.id, int(run.claim)))
    crowd(desk, "late", 1)
    assert push(desk, "one more", follow=True, awaited=True).status == "refused"
    desk.finish(run.tag)
    assert desk.client.llen(desk.keys.followers("retry")) == MOST


def test_a_run_whose_tail_was_cancelled_is_not_evicted(desk: Desk) -> None:
    push(desk, "first", timeout_us=1)
    entries = desk.claim().entries
    push(desk, "tail")
    desk.partition.cancel(["tail"], tombstone_ttl_ms=0).run(desk.client)
    assert desk.client.exists(desk.keys.evictions) == 0
    assert [(each.id, each.reason) for each in desk.claim(4).entries] == [("tail", "cancelled")]
    assert push(desk, "second").covering == "first"
    assert desk.finish(*tags_of(entries)) == 0


def test_what_is_taken_by_name_runs(desk: Desk) -> None:
    push(desk, "first")
    (taken,) = desk.partition.take("mover", ["first"], lease_ms=LEASE_MS).run(desk.client)
    # It is held, so it may have been read: the latest call must wait, and not take its place and its record.
    latest = push(desk, "latest", replace=True)
    assert (latest.status, latest.replaced) == ("blocked", "")
    assert desk.client.hexists(desk.keys.messages, "first")
    assert desk.take(4) == []
    assert desk.finish(taken.tag, consumer="mover") == 0
    assert desk.take(4) == ["latest"]


def test_what_is_taken_by_name_and_given_back_waits(desk: Desk) -> None:
    push(desk, "first")
    (taken,) = desk.partition.take("mover", ["first"], lease_ms=LEASE_MS).run(desk.client)
    desk.release(taken.tag, mode="requeue", consumer="mover")
    assert push(desk, "second").covering == "first"
    assert desk.take(4) == ["first"]
