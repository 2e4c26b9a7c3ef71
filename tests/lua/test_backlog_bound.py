"""A push keeps the bound of a tenant's backlog, `max_waiting` of its quota."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from redis.exceptions import ResponseError

from celery_dq import AnyOf
from celery_dq.options.quota import WHEN_FULL, WhenFull
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord, PushReply
from celery_dq.transport.redis.store.move_calls import store_tenant_settings
from tests.lua.partition_scripts import (
    PartitionScripts,
    make_keyed_record,
    make_quota,
    make_record,
    tags_of,
)

DROPPING: tuple[WhenFull, ...] = ("discard", "dead_letter")
REFUSING: tuple[WhenFull, ...] = ("refuse", "wait")
REASONS = {"discard": b"overflow", "dead_letter": b"dead:overflow"}


def plain(task: str, tenant: str = "t", sequence: int = 0, **fields: Any) -> OutgoingRecord:
    return OutgoingRecord(sequence, task, make_record(tenant, **fields))


def keyed(task: str, key: str = "k", kind: str = "", **options: Any) -> OutgoingRecord:
    """A message with a dedup key; `kind` is "delayed" or ""."""
    return OutgoingRecord(0, task, make_keyed_record("t", key, kind, 8 * 10**15 - 10**12, **options))


def flagged(message: OutgoingRecord, flags: int) -> OutgoingRecord:
    record = message.record
    return message._replace(record=record[:2] + bytes((record[2] | flags,)) + record[3:])


def push(scripts: PartitionScripts, *messages: OutgoingRecord, producer: str = "") -> list[PushReply]:
    return scripts.partition.push(messages, producer=producer).run(scripts.client)


def statuses(scripts: PartitionScripts, *messages: OutgoingRecord, producer: str = "") -> list[str]:
    return [reply.status for reply in push(scripts, *messages, producer=producer)]


def status(scripts: PartitionScripts, message: OutgoingRecord) -> str:
    return statuses(scripts, message)[0]


def bound(scripts: PartitionScripts, most: int, when_full: WhenFull = "refuse", tenant: str = "t") -> None:
    scripts.set_quota(tenant, max_waiting=most, when_full=when_full)


def fill(scripts: PartitionScripts, count: int, tenant: str = "t") -> None:
    scripts.push(*(f"old{n}" for n in range(count)), tenant=tenant)


def reasons(scripts: PartitionScripts) -> dict[str, bytes]:
    found = scripts.client.hgetall(scripts.keys.reasons)
    return {name.decode(): reason for name, reason in found.items()}


def stored(scripts: PartitionScripts) -> set[str]:
    return {name.decode() for name in scripts.client.hkeys(scripts.keys.messages)}


def dead(scripts: PartitionScripts) -> set[str]:
    return {name.decode() for name in scripts.client.hkeys(scripts.keys.dead)}


def counters(scripts: PartitionScripts) -> dict[str, float]:
    names = ("pushed", "full", "overflowed", "discarded", "dead_lettered")
    return {name: found for name in names if (found := scripts.state(name))}


# -- the four answers to a full backlog


@pytest.mark.parametrize("calls", ["one by one", "together", "with other tenants"])
@pytest.mark.parametrize("when_full", WHEN_FULL)
def test_a_push_makes_no_backlog_longer_than_its_bound(
    scripts: PartitionScripts, when_full: WhenFull, calls: str
) -> None:
    bounds = {"t": 3}
    if calls == "with other tenants":
        bounds |= {"u": 1, "v": 0}
    for tenant, most in bounds.items():
        bound(scripts, most, when_full, tenant)
    messages = [plain(f"{tenant}{n}", tenant) for n in range(5) for tenant in bounds]
    if calls == "one by one":
        replies = [push(scripts, each)[0] for each in messages]
    else:
        replies = push(scripts, *messages)
    accepted = {tenant: range(5) for tenant in bounds}
    if when_full in DROPPING:
        waiting = {tenant: range(5 - most, 5) if most else range(5) for tenant, most in bounds.items()}
    else:
        accepted = waiting = {tenant: range(most or 5) for tenant, most in bounds.items()}
    expected = [
        PushReply("accepted", f"{tenant}{n}")
        if n in accepted[tenant]
        else PushReply("full", f"{tenant}{n}", bound=bounds[tenant], waits=when_full == "wait")
        for n in range(5)
        for tenant in bounds
    ]
    assert replies == expected
    for tenant, numbers in waiting.items():
        assert scripts.waiting(tenant) == [f"{tenant}{n}" for n in numbers]
    turned_away = {f"{tenant}{n}" for tenant in bounds for n in range(5) if n not in waiting[tenant]}
    count = float(len(turned_away))
    kept = {each.id for each in replies if each.status == "accepted"}
    assert stored(scripts) == kept
    expected_counts = {"pushed": float(len(kept))}
    if when_full in DROPPING:
        assert reasons(scripts) == dict.fromkeys(turned_away, REASONS[when_full])
        assert dead(scripts) == (turned_away if when_full == "dead_letter" else set())
        expected_counts |= {"overflowed": count, "discarded": count}
        if when_full == "dead_letter":
            expected_counts["dead_lettered"] = count
    else:
        expected_counts["full"] = count
    assert counters(scripts) == expected_counts


def test_room_comes_with_each_claim(scripts: PartitionScripts) -> None:
    bound(scripts, 2)
    fill(scripts, 2)
    assert status(scripts, plain("a")) == "full"
    assert scripts.take() == ["old0"]
    # The first one is in a worker's hands, and does not wait.
    assert statuses(scripts, plain("a"), plain("b")) == ["accepted", "full"]
    assert scripts.waiting("t") == ["old1", "a"]


def test_the_bound_of_one_tenant_refuses_no_message_of_another_one(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    fill(scripts, 1)
    assert statuses(scripts, plain("a"), plain("b", "other"), plain("c", "other")) == [
        "full",
        "accepted",
        "accepted",
    ]


@pytest.mark.parametrize("when_full", DROPPING)
def test_the_first_in_the_tenants_order_are_dropped(scripts: PartitionScripts, when_full: WhenFull) -> None:
    bound(scripts, 2, when_full)
    push(scripts, plain("low"), plain("high", priority=9))
    push(scripts, plain("middle", priority=3), plain("other"))
    assert scripts.waiting("t") == ["low", "other"]
    assert set(reasons(scripts)) == {"high", "middle"}


def test_a_message_that_was_dropped_is_delivered_for_its_bookkeeping(scripts: PartitionScripts) -> None:
    bound(scripts, 1, "discard")
    scripts.partition.pause("t").run(scripts.client)
    push(scripts, plain("a"))
    scripts.take_token()
    push(scripts, plain("b"))
    assert scripts.token()
    (entry,) = scripts.claim(4, discards=4).entries
    assert (entry.id, entry.reason) == ("a", "overflow")
    scripts.finish(entry.tag)
    assert stored(scripts) == {"b"}


def test_a_dead_letter_knows_its_crashes_and_is_replayed_above_the_bound(scripts: PartitionScripts) -> None:
    bound(scripts, 1, "dead_letter")
    push(scripts, plain("a"))
    scripts.release(*tags_of(scripts.claim().entries), mode="crashed")
    push(scripts, plain("b"))
    info = scripts.client.hget(scripts.keys.dead_info, "a")
    assert b'"reason":"overflow"' in info
    assert b'"deliveries":1,"tenant":"t"' in info
    new = scripts.partition.replay("a").run(scripts.client)
    assert scripts.waiting("t") == ["b", new]
    push(scripts, plain("c"))
    assert b'"deliveries":0' in scripts.client.hget(scripts.keys.dead_info, "b")


# -- messages that do not count, or are never refused


@pytest.mark.parametrize("when_full", WHEN_FULL)
def test_delayed_messages_count_when_they_are_due(scripts: PartitionScripts, when_full: WhenFull) -> None:
    bound(scripts, 1, when_full)
    later = scripts.now_us() + 10**12
    later_ones = [plain(f"later{n}", due_us=later) for n in range(3)]
    assert statuses(scripts, *later_ones, plain("a")) == ["accepted"] * 4
    assert scripts.waiting("t") == ["a"]
    scripts.client.zadd(scripts.keys.delayed, {f"later{n}": 5 + n for n in range(3)})
    scripts.partition.hand_over_wakeup("").run(scripts.client)
    assert scripts.waiting("t") == ["later0", "later1", "later2", "a"]
    reply = push(scripts, plain("b"))[0]
    if when_full in DROPPING:
        assert scripts.waiting("t") == ["b"]
        assert set(reasons(scripts)) == {"later0", "later1", "later2", "a"}
    else:
        assert (reply.status, reply.bound) == ("full", 1)
        assert len(scripts.waiting("t")) == 4


@pytest.mark.parametrize("flags", [8, 12])
def test_a_message_that_was_accepted_before_is_never_refused(scripts: PartitionScripts, flags: int) -> None:
    bound(scripts, 1)
    fill(scripts, 1)
    returned = flagged(plain("back", due_us=5, priority=3, body=b"[1]"), flags)
    call = scripts.partition.push([returned, plain("new")], wall_us=1000)
    assert [reply.status for reply in call.run(scripts.client)] == ["accepted", "full"]
    assert scripts.waiting("t") == ["back", "old0"]
    raw = scripts.client.hget(scripts.keys.messages, "back")
    record = MessageRecord.unpack(raw)
    assert (record.tenant, record.priority, record.body) == ("t", 3, b"[1]")
    assert raw[2] == 0


def test_a_message_with_a_key_that_was_accepted_before_keeps_its_key(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    fill(scripts, 1)
    assert statuses(scripts, flagged(keyed("back"), 8), keyed("second")) == ["accepted", "declined"]
    raw = scripts.client.hget(scripts.keys.messages, "back")
    assert raw == keyed("back").record


def test_an_accepted_message_takes_the_room_of_the_others_of_its_call(scripts: PartitionScripts) -> None:
    bound(scripts, 2)
    assert statuses(scripts, flagged(plain("back"), 8), plain("a"), plain("b")) == [
        "accepted",
        "accepted",
        "full",
    ]


def test_a_cancelled_message_becomes_a_discard_also_where_there_is_no_room(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    fill(scripts, 1)
    scripts.partition.cancel(["a"], tombstone_ttl_ms=60_000).run(scripts.client)
    assert statuses(scripts, plain("a"), plain("b")) == ["discarded", "full"]
    assert reasons(scripts) == {"a": b"cancelled"}


def test_returned_and_reaped_messages_keep_their_places(scripts: PartitionScripts) -> None:
    bound(scripts, 2)
    fill(scripts, 2)
    entries = scripts.claim(2).entries
    push(scripts, plain("a"), plain("b"))
    scripts.release(entries[0].tag)
    scripts.lose()
    assert scripts.reap() == 1
    assert scripts.waiting("t") == ["old0", "old1", "a", "b"]
    assert status(scripts, plain("c")) == "full"


@pytest.mark.parametrize("when_full", WHEN_FULL)
def test_a_retry_on_a_singleton_queue_takes_its_place(scripts: PartitionScripts, when_full: WhenFull) -> None:
    bound(scripts, 1, when_full)
    scripts.partition.fence(1).run(scripts.client)
    push(scripts, plain("a"))
    (entry,) = scripts.claim(1, "c1@1").entries
    push(scripts, plain("b"))
    later = scripts.now_us() + 10**12
    (retry, new) = push(scripts, plain("a", due_us=later), plain("c"))
    assert retry.status == "accepted"
    if when_full in DROPPING:
        assert scripts.waiting("t") == ["c"]
    else:
        assert new.status == "full"
        assert scripts.waiting("t") == [retry.id, "b"]
    scripts.finish(entry.tag, consumer="c1@1")


# -- dedup keys


@pytest.mark.parametrize("when_full", REFUSING)
def test_a_message_whose_key_is_free_needs_room(scripts: PartitionScripts, when_full: WhenFull) -> None:
    bound(scripts, 1, when_full)
    fill(scripts, 1)
    assert status(scripts, keyed("a")) == "full"
    # It has got no lock, so none is left over.
    assert not scripts.client.exists(scripts.keys.dedup_locks, scripts.keys.dedup_members)
    assert scripts.state("accepted") == 0


def test_messages_that_another_one_covers_need_no_room(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    push(scripts, keyed("head"))
    follower = keyed("follower", follow=True, awaited=True)
    assert statuses(scripts, keyed("declined"), follower, plain("a")) == ["declined", "following", "full"]
    assert scripts.waiting("t") == ["head"]


def test_messages_that_a_delayed_one_covers_need_no_room(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    push(scripts, keyed("later", kind="delayed"))
    fill(scripts, 1)
    follower = keyed("follower", follow=True, awaited=True)
    assert statuses(scripts, keyed("declined"), follower) == ["declined", "following"]


@pytest.mark.parametrize("how", ["released", "delayed"])
def test_a_message_that_replaces_the_one_behind_a_returned_one_needs_no_room(
    scripts: PartitionScripts, how: str
) -> None:
    bound(scripts, 1)
    push(scripts, keyed("head"))
    (entry,) = scripts.claim().entries
    push(scripts, keyed("tail"))
    if how == "released":
        scripts.release(entry.tag)
    else:
        scripts.requeue_and_pause(entry.tag, alone=True, record=keyed("head").record)
        fill(scripts, 1)
    reply = push(scripts, keyed("latest", replace=True))[0]
    assert (reply.status, reply.replaced) == ("blocked", "tail")
    assert scripts.waiting("t") == ["head" if how == "released" else "old0"]


def test_a_message_behind_a_running_one_needs_no_room_and_waits_above_the_bound(
    scripts: PartitionScripts,
) -> None:
    bound(scripts, 1)
    push(scripts, keyed("head"))
    (entry,) = scripts.claim().entries
    fill(scripts, 1)
    assert statuses(scripts, keyed("tail"), keyed("latest", replace=True)) == ["blocked", "blocked"]
    assert scripts.waiting("t") == ["old0"]
    scripts.finish(entry.tag)
    assert scripts.waiting("t") == ["old0", "latest"]
    assert status(scripts, plain("a")) == "full"


def test_the_retry_of_a_run_waits_for_its_lock_and_needs_no_room(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    push(scripts, keyed("head"))
    (entry,) = scripts.claim().entries
    fill(scripts, 1)
    assert status(scripts, keyed("retry", continues=(entry.id, int(entry.claim)))) == "accepted"
    assert scripts.waiting("t") == ["old0"]


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "in line"])
@pytest.mark.parametrize("when_full", WHEN_FULL)
def test_a_message_that_replaces_a_waiting_one_needs_no_room(
    scripts: PartitionScripts, when_full: WhenFull, others: int
) -> None:
    bound(scripts, 1 + others, when_full)
    fill(scripts, others)
    push(scripts, keyed("first"))
    replies = push(scripts, keyed("second", replace=True), keyed("third", replace=True))
    assert [(each.status, each.replaced) for each in replies] == [
        ("accepted", "first"),
        ("accepted", "second"),
    ]
    assert scripts.waiting("t") == ["old0", "third"][1 - others :]
    assert reasons(scripts) == {}


@pytest.mark.parametrize("when_full", REFUSING)
def test_a_message_that_replaces_a_delayed_one_needs_room(
    scripts: PartitionScripts, when_full: WhenFull
) -> None:
    bound(scripts, 1, when_full)
    push(scripts, keyed("later", kind="delayed"))
    fill(scripts, 1)
    assert status(scripts, keyed("now", replace=True)) == "full"
    assert stored(scripts) == {"later", "old0"}
    scripts.take()
    reply = push(scripts, keyed("now", replace=True))[0]
    assert (reply.status, reply.replaced) == ("accepted", "later")


def test_a_message_that_replaces_a_delayed_one_of_its_call_needs_room(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    later, now = keyed("later", kind="delayed"), keyed("now", replace=True)
    assert statuses(scripts, later, now, plain("a")) == ["accepted", "accepted", "full"]
    assert scripts.waiting("t") == ["now"]
    assert status(scripts, keyed("other", "k2", kind="delayed")) == "accepted"
    assert statuses(scripts, keyed("x", "k3", kind="delayed"), keyed("y", "k3", replace=True)) == [
        "accepted",
        "full",
    ]
    assert stored(scripts) == {"now", "other", "x"}


@pytest.mark.parametrize("together", [False, True])
def test_a_delayed_message_that_replaces_a_waiting_one_makes_room(
    scripts: PartitionScripts, together: bool
) -> None:
    bound(scripts, 1)
    first, later = keyed("first"), keyed("later", kind="delayed", replace=True)
    if not together:
        push(scripts, first)
    messages = [*([first] if together else []), later, plain("a"), plain("b")]
    assert statuses(scripts, *messages)[-3:] == ["accepted", "accepted", "full"]
    assert scripts.waiting("t") == ["a"]


@pytest.mark.parametrize("awaited", [False, True])
def test_two_of_one_key_in_one_call_need_the_room_of_one(scripts: PartitionScripts, awaited: bool) -> None:
    bound(scripts, 2)
    first, second = keyed("a", awaited=awaited), keyed("b", replace=True, awaited=awaited)
    assert statuses(scripts, first, keyed("declined"), second, plain("c"), plain("d")) == [
        "accepted",
        "declined",
        "accepted",
        "accepted",
        "full",
    ]
    assert scripts.waiting("t") == ["b", "c"]


def test_a_lock_whose_message_is_gone_lets_no_message_in(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    push(scripts, keyed("gone", kind="delayed"))
    fill(scripts, 1)
    scripts.client.hdel(scripts.keys.messages, "gone")
    assert status(scripts, keyed("a")) == "full"
    assert scripts.waiting("t") == ["old0"]


@pytest.mark.parametrize("when_full", DROPPING)
def test_the_lock_of_a_dropped_message_is_free(scripts: PartitionScripts, when_full: WhenFull) -> None:
    bound(scripts, 1, when_full)
    push(scripts, keyed("a"))
    push(scripts, plain("b"))
    assert not scripts.client.exists(scripts.keys.dedup_locks, scripts.keys.dedup_members)
    # In one call, too, and the second one of the key is declined before the first one is dropped.
    assert statuses(scripts, keyed("c"), keyed("d"), plain("e")) == ["accepted", "declined", "accepted"]
    assert status(scripts, keyed("f")) == "accepted"
    assert scripts.waiting("t") == ["f"]


@pytest.mark.parametrize("when_full", DROPPING)
def test_the_message_behind_a_dropped_one_gets_the_lock(
    scripts: PartitionScripts, when_full: WhenFull
) -> None:
    bound(scripts, 1, when_full)
    push(scripts, keyed("head"))
    (entry,) = scripts.claim().entries
    push(scripts, keyed("tail"))
    scripts.release(entry.tag)
    push(scripts, plain("a"))
    # The tail was accepted before, so it may be above the bound.
    assert scripts.waiting("t") == ["tail", "a"]
    assert reasons(scripts) == {"head": REASONS[when_full]}
    assert push(scripts, keyed("b"))[0].covering == "tail"
    # This push drops it, because each one drops all that is too much.
    assert scripts.waiting("t") == ["a"]


def test_the_followers_of_a_dropped_message_get_its_end(scripts: PartitionScripts) -> None:
    bound(scripts, 1, "discard")
    push(scripts, keyed("head"), keyed("follower", follow=True, awaited=True), plain("a"))
    (entry,) = scripts.claim(0, discards=4).entries or scripts.claim(1, discards=4).entries[-1:]
    assert (entry.id, entry.reason) == ("head", "overflow")
    scripts.finish(entry.tag)
    assert reasons(scripts) == {"follower": b"covered:head"}


# -- calls that are sent again


def test_a_call_whose_answer_was_lost_stores_nothing_twice(scripts: PartitionScripts) -> None:
    bound(scripts, 2)
    call = [plain(f"m{n}", sequence=n) for n in range(1, 6)]
    expected = ["accepted", "accepted", "full", "full", "full"]
    assert statuses(scripts, *call, producer="p") == expected
    assert statuses(scripts, *call, producer="p") == ["seen", "seen", "full", "full", "full"]
    scripts.take()
    assert statuses(scripts, *call, producer="p") == ["seen", "seen", "accepted", "full", "full"]
    scripts.take(2)
    assert statuses(scripts, *call, producer="p") == ["seen", "seen", "seen", "accepted", "accepted"]
    assert statuses(scripts, *call, producer="p") == ["seen"] * 5
    assert counters(scripts) == {"pushed": 5, "full": 3 + 3 + 2}


def test_a_single_message_that_was_full_is_sent_again(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    fill(scripts, 1)
    for _ in range(2):
        assert statuses(scripts, plain("a", sequence=7), producer="p") == ["full"]
    assert stored(scripts) == {"old0"}
    scripts.take()
    assert statuses(scripts, plain("a", sequence=7), producer="p") == ["accepted"]
    assert statuses(scripts, plain("a", sequence=7), producer="p") == ["seen"]
    assert scripts.waiting("t") == ["a"]


def test_messages_that_were_full_may_be_sent_again_one_by_one(scripts: PartitionScripts) -> None:
    bound(scripts, 1, "refuse", "t")
    bound(scripts, 1, "wait", "u")
    call = [plain("a", sequence=1), plain("b", sequence=2), plain("c", "u", 3), plain("d", "u", 4)]
    assert statuses(scripts, *call, producer="p") == ["accepted", "full", "accepted", "full"]
    scripts.take(2)
    # The publisher waits for one of them; the other one stays full and is not taken for a repetition.
    assert statuses(scripts, call[3], producer="p") == ["accepted"]
    assert statuses(scripts, *call, producer="p") == ["seen", "accepted", "seen", "seen"]


def test_a_full_message_that_stands_twice_in_a_call_is_stored_once(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    fill(scripts, 1)
    again = plain("a", sequence=3)
    assert statuses(scripts, again, producer="p") == ["full"]
    bound(scripts, 5)
    assert statuses(scripts, again, again, producer="p") == ["accepted", "seen"]


@pytest.mark.parametrize("tenant", ["t", "other"])
def test_the_next_message_of_a_producer_ends_its_last_call(scripts: PartitionScripts, tenant: str) -> None:
    bound(scripts, 1)
    fill(scripts, 1)
    assert statuses(scripts, plain("a", sequence=1), plain("b", sequence=2), producer="p") == ["full"] * 2
    scripts.take()
    assert statuses(scripts, plain("c", tenant, sequence=3), producer="p") == ["accepted"]
    assert scripts.client.get(scripts.keys.producer("p")) == b"3"
    assert statuses(scripts, plain("a", sequence=1), producer="p") == ["seen"]


def test_the_marker_of_a_full_call_expires_like_any_other(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    call = [plain("a", sequence=1), plain("b", sequence=2)]
    scripts.partition.push(call, producer="p", marker_ttl_ms=5000).run(scripts.client)
    assert scripts.client.get(scripts.keys.producer("p")) == b"2 2"
    assert 0 < scripts.client.pttl(scripts.keys.producer("p")) <= 5000


# -- changes of the bound


@pytest.mark.parametrize("when_full", WHEN_FULL)
def test_a_lower_bound_acts_on_the_next_push(scripts: PartitionScripts, when_full: WhenFull) -> None:
    bound(scripts, 5, when_full)
    fill(scripts, 5)
    bound(scripts, 2, when_full)
    assert len(scripts.waiting("t")) == 5
    push(scripts, plain("a"))
    if when_full in DROPPING:
        assert scripts.waiting("t") == ["old4", "a"]
    else:
        assert scripts.waiting("t") == [f"old{n}" for n in range(5)]
    bound(scripts, 0)
    assert status(scripts, plain("b")) == "accepted"


def test_a_push_drops_at_most_a_thousand(scripts: PartitionScripts) -> None:
    for tenant in ("t", "u"):
        for part in range(2):
            scripts.push(*(f"{tenant}{part}{n}" for n in range(900)), tenant=tenant)
        bound(scripts, 10, "discard", tenant)
    push(scripts, plain("a", "u"), plain("b", "u"))
    assert [len(scripts.waiting(tenant)) for tenant in "tu"] == [1800, 802]
    # What a call adds to a tenant comes first: no backlog becomes longer.
    push(scripts, *(plain(f"c{n}", "tu"[n % 2]) for n in range(800)), plain("v", "t"))
    assert [len(scripts.waiting(tenant)) for tenant in "tu"] == [1601, 802]
    push(scripts, plain("d", "u"))
    assert len(scripts.waiting("u")) == 10
    # One of a tenant that was at its bound takes nothing from what another one has too many.
    push(scripts, plain("e", "u"), plain("f"))
    assert [len(scripts.waiting(tenant)) for tenant in "tu"] == [603, 10]
    push(scripts, plain("g"))
    assert [len(scripts.waiting(tenant)) for tenant in "tu"] == [10, 10]
    assert scripts.state("overflowed") == 1000 + 1000 + 793 + 1000 + 594


@pytest.mark.parametrize("source", ["default", "config", "moved"])
def test_a_bound_comes_from_each_kind_of_quota(scripts: PartitionScripts, source: str) -> None:
    partition, quota = scripts.partition, make_quota(max_waiting=1)
    assert scripts.state("bounds") == 0
    if source == "default":
        partition.set_default_quota(quota).run(scripts.client)
    elif source == "config":
        partition.bring_settings_quota(quota, by="w1", memory_ms=1).run(scripts.client)
    else:
        settings = [("t:t", quota, b"", b"", b"", b"")]
        assert store_tenant_settings(partition, (b"", b""), settings).run(scripts.client)
    assert scripts.state("bounds") == 1
    assert statuses(scripts, plain("a"), plain("b")) == ["accepted", "full"]


def test_quotas_without_a_bound_leave_a_partition_without_bounds(scripts: PartitionScripts) -> None:
    partition, quota = scripts.partition, make_quota(5, weight=2)
    scripts.set_quota("t", 5)
    partition.set_default_quota(quota).run(scripts.client)
    partition.bring_settings_quota(quota, by="w1", memory_ms=1).run(scripts.client)
    assert scripts.state("bounds") == 0


def test_a_tenants_own_quota_replaces_the_default_bound(scripts: PartitionScripts) -> None:
    scripts.partition.set_default_quota(make_quota(max_waiting=1)).run(scripts.client)
    scripts.set_quota("t", weight=2)
    assert statuses(scripts, plain("a"), plain("b"), plain("c", "u"), plain("d", "u")) == [
        "accepted",
        "accepted",
        "accepted",
        "full",
    ]


def test_a_paused_tenant_has_its_bound(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    scripts.partition.pause("t").run(scripts.client)
    assert statuses(scripts, plain("a"), plain("b")) == ["accepted", "full"]


# -- sets of resources, and records that other programs wrote


@pytest.mark.parametrize("when_full", WHEN_FULL)
def test_the_backlog_of_a_set_has_the_default_bound(scripts: PartitionScripts, when_full: WhenFull) -> None:
    quota = make_quota(max_waiting=2, when_full=when_full)
    scripts.partition.set_default_quota(quota).run(scripts.client)
    both = AnyOf("a", "b")
    push(scripts, *(plain(f"s{n}", both) for n in range(4)), plain("own", "a"))
    expected = ["s2", "s3"] if when_full in DROPPING else ["s0", "s1"]
    assert scripts.waiting(both) == expected
    assert scripts.state("sets") == 1
    assert scripts.waiting("a") == ["own"]
    taken = scripts.claim(10, discards=0).entries
    assert {each.id for each in taken} == {*expected, "own"}
    assert scripts.state("sets") == 0


def test_unreadable_messages_are_dropped_like_others_and_kept_aside(scripts: PartitionScripts) -> None:
    bound(scripts, 4, "discard")
    fill(scripts, 4)
    scripts.client.hset(scripts.keys.messages, "old0", b"garbage")
    scripts.client.hset(scripts.keys.deliveries, mapping={"old0": 1, "old2": 1})
    scripts.client.hdel(scripts.keys.messages, "old1")
    push(scripts, plain("a"), plain("b"), plain("c"))
    assert scripts.waiting("t") == ["old3", "a", "b", "c"]
    assert reasons(scripts) == {"old2": b"overflow"}
    assert dead(scripts) == {"old0"}
    assert b'"reason":"corrupt"' in scripts.client.hget(scripts.keys.dead_info, "old0")
    assert stored(scripts) == {"old2", "old3", "a", "b", "c"}
    assert scripts.client.hget(scripts.keys.unreadable, "waiting|t") == b"old1"
    assert scripts.client.hgetall(scripts.keys.deliveries) == {b"old2": b"1"}
    assert (scripts.state("dropped"), scripts.state("overflowed")) == (2, 1)


@pytest.mark.parametrize("when_full", WHEN_FULL)
def test_a_damaged_single_message_takes_room_once(scripts: PartitionScripts, when_full: WhenFull) -> None:
    bound(scripts, 1, when_full)
    fill(scripts, 1)
    scripts.client.hset(scripts.keys.single, "t", b"short")
    push(scripts, plain("a"))
    assert scripts.take(4, discards=0) == (["a"] if when_full in DROPPING else [])
    assert status(scripts, plain("b")) == "accepted"


@pytest.mark.parametrize("flags", [2, 16], ids=["without its key", "of a later version"])
def test_a_flag_that_the_script_cannot_follow_is_refused(scripts: PartitionScripts, flags: int) -> None:
    with pytest.raises(ResponseError, match="the dedup key of record 1 cannot be read"):
        push(scripts, flagged(plain("a"), flags))


def test_a_quota_of_another_form_bounds_nothing(scripts: PartitionScripts) -> None:
    bound(scripts, 1)
    scripts.client.hset(scripts.keys.quotas, "t:t", struct.pack(">ddddB", 0, 1, 1, 0, 0))
    assert statuses(scripts, plain("a"), plain("b")) == ["accepted", "accepted"]


def random_message(draw: random.Random, task: str) -> OutgoingRecord:
    accepted = 8 * (draw.random() < 0.1)
    if draw.random() < 0.4:
        due_us = 8 * 10**15 if draw.random() < 0.2 else 0
        return flagged(plain(task, due_us=due_us), accepted)
    kind = draw.choice(["", "", "delayed"])
    options = {name: draw.random() < 0.5 for name in ("replace", "waiting", "follow", "awaited")}
    return flagged(keyed(task, draw.choice("kl"), kind, **options), accepted)


@pytest.mark.parametrize("seed", range(40))
def test_a_call_of_many_messages_is_like_many_calls(client: Any, seed: int) -> None:
    draw = random.Random(seed)
    together, single = PartitionScripts(client, "together"), PartitionScripts(client, "single")
    most = draw.choice([1, 2, 3])
    for scripts in (together, single):
        bound(scripts, most, draw.choice(REFUSING))
    for number in range(10):
        messages = [random_message(draw, f"m{number}.{n}") for n in range(draw.choice([2, 6]))]
        before = len(together.waiting("t"))
        returned = sum(each.record[2] >= 8 for each in messages)
        replies = push(together, *messages)
        expected = [push(single, each)[0] for each in messages]
        assert [each[:2] for each in replies] == [each[:2] for each in expected]
        assert len(together.waiting("t")) <= max(before, most) + returned
        assert together.waiting("t") == single.waiting("t")
        assert stored(together) == stored(single)
        assert together.state("full") == single.state("full")
        want, free = draw.choice([0, 1, 3]), draw.random() < 0.5
        claimed = [scripts.claim(want).entries for scripts in (together, single)]
        assert [each.id for each in claimed[0]] == [each.id for each in claimed[1]]
        for scripts, entries in zip((together, single), claimed, strict=True):
            scripts.finish(*tags_of(entries)) if free else scripts.release(*tags_of(entries))
