"""Lua does not roll back: later scripts repair the state that a broken-off script leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_dq.transport.partition_replies import OutgoingRecord
from tests.lua.partition_scripts import LEASE_MS, PartitionScripts, make_record, tags_of

#: Fields of the hash ``state`` that are numbers, without the fencing tokens.
NUMBERS = (
    *("seq", "v", "claim", "held", "head", "next_look", "evict", "floor", "accepted", "clock", "discards_at"),
    *("resume_at", "paused_until", "paused_since", "opened", "sets", "pushed", "settled", "dropped"),
)


def held(scripts: PartitionScripts, *consumers: str) -> int:
    return sum(scripts.client.hlen(scripts.keys.held(consumer)) for consumer in consumers)


def break_off(scripts: PartitionScripts) -> None:
    """Let a claim of ``c1`` fail after its messages are written, and before the counters are."""
    key = scripts.keys.limiter
    scripts.client.set(key, "a key of the wrong type")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        scripts.claim(2)
    scripts.client.delete(key)


def test_a_heartbeat_counts_messages_held_after_a_claim_that_broke_off(scripts: PartitionScripts) -> None:
    scripts.push("a", "b", "c")
    assert scripts.take(1, "c2") == ["a"]
    break_off(scripts)
    assert held(scripts, "c1", "c2") == 3
    assert scripts.state("held") != 3
    scripts.partition.heartbeat("c1", lease_ms=LEASE_MS).run(scripts.client)
    assert scripts.state("held") == 3
    # From then on it stays right.
    scripts.lose()
    scripts.reap("c2")
    assert scripts.state("held") == held(scripts, "c1", "c2") == 1
    assert scripts.finish(*tags_of(scripts.claim(1, "c2").entries), consumer="c2") == 0


def test_messages_of_a_broken_off_claim_come_back_when_the_consumer_is_gone(
    scripts: PartitionScripts,
) -> None:
    scripts.push("a", "b")
    break_off(scripts)
    assert held(scripts, "c1") == 2
    scripts.lose()
    assert scripts.reap("c2") == 2
    assert scripts.state("held") == held(scripts, "c1", "c2") == 0
    assert scripts.waiting() == ["a", "b"]


def test_a_heartbeat_counts_messages_still_to_be_restored(scripts: PartitionScripts) -> None:
    scripts.push(*(f"m{i}" for i in range(10)))
    scripts.take(10)
    scripts.lose()
    scripts.client.hset(scripts.keys.state, "held", 99)
    scripts.reap("c2", limit=4)
    assert scripts.state("held") == 6


def test_many_consumers_are_counted_by_some_heartbeats(scripts: PartitionScripts) -> None:
    scripts.push("a")
    scripts.take(1)
    scripts.client.zadd(scripts.keys.leases, {f"w{i}": scripts.now_us() + 10**9 for i in range(300)})
    scripts.client.hset(scripts.keys.state, "held", 99)
    for _ in range(200):
        scripts.partition.heartbeat("c1", lease_ms=LEASE_MS).run(scripts.client)
        if scripts.state("held") == 1:
            break
    assert scripts.state("held") == 1


def test_a_claim_that_breaks_off_leaves_the_wake_up_to_other_consumers(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    (entry,) = scripts.claim(1).entries
    assert scripts.token()
    scripts.client.hset(scripts.keys.held("c1"), entry.id, "short")
    with pytest.raises(redis.ResponseError, match="too short"):
        scripts.claim(1, finish=tags_of([entry]))
    assert scripts.token()


@pytest.mark.parametrize("value", ["not a number", "inf", "-inf", "nan", "1e400"])
@pytest.mark.parametrize("field", NUMBERS)
def test_a_field_that_is_no_number_is_set_aside(scripts: PartitionScripts, field: str, value: str) -> None:
    """Something else has written it. Whatever meets it first goes on without it."""

    def break_field() -> None:
        scripts.client.hset(scripts.keys.state, field, value)

    scripts.push("a", "b", "c")
    entries = scripts.claim(1).entries
    break_field()
    assert scripts.finish(*tags_of(entries)) == 0
    break_field()
    scripts.push("d")
    scripts.push("e", "f")
    break_field()
    assert scripts.take(2) == ["b", "c"]
    break_field()
    scripts.partition.heartbeat("c1", lease_ms=LEASE_MS).run(scripts.client)
    assert scripts.take(3) == ["d", "e", "f"]
    set_aside = scripts.client.hgetall(scripts.keys.unreadable)
    assert set(set_aside) <= {f"state|{field}".encode()}
    assert set(set_aside.values()) <= {value.encode()}
    if field in ("seq", "v", "floor", "claim", "held", "pushed"):
        assert set_aside


@pytest.mark.parametrize("value", ["not a number", "inf", "nan"])
def test_a_fencing_token_that_is_no_number_is_not_set_aside(scripts: PartitionScripts, value: str) -> None:
    scripts.push("a", "b")
    scripts.client.hset(scripts.keys.state, "epoch", value)
    with pytest.raises(redis.ResponseError, match="epoch"):
        scripts.push("c")
    assert scripts.client.hget(scripts.keys.state, "epoch") == value.encode()


def test_the_entry_of_a_single_message_is_set_aside(scripts: PartitionScripts) -> None:
    scripts.push("a")
    scripts.push("b", tenant="7")
    for entry in (b"", b"short", b"\0" * 8 + b"no such id"):
        scripts.client.hset(scripts.keys.single, "", entry)
        scripts.take(2)
        assert scripts.client.hgetall(scripts.keys.unreadable) == {b"waiting|": entry}
        scripts.client.zadd(scripts.keys.turn, {"": 0})


@pytest.mark.parametrize("entry", [b"", b"short", b"\0" * 8 + b"no such id"])
@pytest.mark.parametrize("behind", [(), ("c",), ("c", "d")])
def test_a_message_that_nothing_names_is_recovered(
    scripts: PartitionScripts, entry: bytes, behind: tuple[str, ...]
) -> None:
    scripts.push("a")
    scripts.push("b", tenant="7")
    scripts.client.hset(scripts.keys.single, "", entry)
    scripts.push(*behind)
    scripts.push("late", due_us=int(scripts.now_us()) + 10**9)
    assert set(scripts.take(1 + len(behind))) == {"b", *behind}
    ids = ["a", "b", *behind, "late", "no such id"]
    assert scripts.partition.recover(ids, dry_run=True).run(scripts.client) == 1
    assert not scripts.client.exists(scripts.keys.dead)
    assert scripts.partition.recover(ids).run(scripts.client) == 1
    assert scripts.partition.recover(ids).run(scripts.client) == 0
    assert scripts.partition.replay("a").run(scripts.client) == "a"
    assert scripts.take(1) == ["a"]


def test_a_score_that_is_no_number_is_the_first(scripts: PartitionScripts) -> None:
    scripts.push("a")
    scripts.client.hset(scripts.keys.single, "", b"\xff" * 8 + b"a")
    (entry,) = scripts.claim(1).entries
    scripts.release(*tags_of([entry]))
    assert scripts.take(1) == ["a"]


#: Values of other programs in the place of a number.
RUBBISH = (b"not a number", b"inf", b"-inf", b"nan", b"1e400", b"", b"1.5", b"\xff")


@pytest.mark.parametrize("value", RUBBISH)
@pytest.mark.parametrize("key", ["deliveries", "running", "reap_grace", "producer", "quotas", "quota_info"])
def test_an_entry_that_is_no_number_stops_no_script(
    scripts: PartitionScripts, key: str, value: bytes
) -> None:
    """Such an entry counts as absent for each script."""
    client, keys, partition = scripts.client, scripts.keys, scripts.partition

    def break_entries() -> None:
        if key == "reap_grace":
            for consumer in ("c1", "reaper"):
                client.set(f"{keys.prefix}{key}:{consumer}", value, px=60_000)
        elif key == "producer":
            client.set(f"{keys.prefix}{key}:p", value)
        else:
            client.hset(keys.prefix + key, mapping=dict.fromkeys(["", "t", *"abcdefg"], value))

    scripts.push("a", "b", "c")
    scripts.push("t1", "t2", tenant="t")
    entries = scripts.claim(1).entries
    again = OutgoingRecord(2, "g", make_record(""))
    steps: list[Callable[[], Any]] = [
        lambda: scripts.finish(*tags_of(entries)),
        lambda: scripts.push("d"),
        lambda: scripts.push("e", "f"),
        lambda: partition.push([again], producer="p").run(client),
        lambda: scripts.take(2),
        scripts.lose,
        lambda: scripts.reap(max_deliveries=0),
        lambda: partition.heartbeat("c1", lease_ms=LEASE_MS).run(client),
        lambda: partition.locate("b").run(client),
        lambda: partition.explain_tenant("t").run(client),
        lambda: partition.backlogs("turn", 0).run(client),
    ]
    for step in steps:
        break_entries()
        step()
    client.delete(*(f"{keys.prefix}{each}" for each in ("quotas", "quota_info", "reap_grace:c1")))
    taken = []
    for _ in range(20):
        if key in ("deliveries", "running", "producer"):
            break_entries()
        entries = scripts.claim(9).entries
        assert scripts.finish(*tags_of(entries)) == 0
        taken += [each.id for each in entries]
    assert sorted(taken) == ["b", "c", "d", "e", "f", "g", "t1", "t2"]
