"""Who follows a call gets the end of one that ran; and only who keeps others waiting is evicted."""

from __future__ import annotations

import struct
from typing import Any

from celery_dq.transport.redis.record import DedupSection
from celery_dq.transport.redis.replies import Outgoing, Pushed
from tests.lua.desk import LEASE_MS, Desk, make_record, tags_of


def push(desk: Desk, task: str, **options: Any) -> Pushed:
    section = DedupSection("k", **options).pack()
    record = bytearray(make_record())
    record[2] |= 2
    packed = bytes(record) + section + struct.pack(">H", len(section))
    return desk.partition.push([Outgoing(0, task, packed)]).run(desk.client)[0]


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
