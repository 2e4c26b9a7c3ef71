"""The counters in the state of a partition, waiting times, and the oldest waiting message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis

import celery_dq
from benchmarks.counter_cost import without_counters
from celery_dq.inspector.queue_counters import (
    WAIT_BOUNDS_S,
    QueueCounters,
    WaitingTimes,
    oldest_waiting_s,
)
from celery_dq.inspector.queues import queue_snapshot
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.lua.partition_scripts import PartitionScripts, make_keyed_record, make_record, tags_of

HOUR_S = 3600.0


def counters(scripts: PartitionScripts) -> QueueCounters:
    return queue_snapshot([scripts.partition], scripts.client).counters


def counts(scripts: PartitionScripts) -> dict[str, int]:
    """The counters that are not 0."""
    return {name: n for name, n in vars(counters(scripts)).items() if isinstance(n, int) and n}


def push_keyed(scripts: PartitionScripts, *ids: str, **options: Any) -> None:
    record = make_keyed_record("", "k", "", 0, **options)
    call = scripts.partition.push([OutgoingRecord(0, each, record) for each in ids])
    call.run(scripts.client)


def test_a_partition_without_messages_has_counted_nothing(scripts: PartitionScripts) -> None:
    assert counts(scripts) == {}
    assert counters(scripts).waits_alone == WaitingTimes()


def test_the_counters_of_a_redis_that_keeps_its_data_survive_its_crash() -> None:
    with RedisServer(appendonly=True) as server:
        with redis.Redis.from_url(server.url()) as client:
            scripts = PartitionScripts(client)
            scripts.push("a", "b", "c")
            scripts.finish(*tags_of(scripts.claim(2).entries))
            before = counters(scripts)
        server.kill()
        server.restart()
        with redis.Redis.from_url(server.url()) as client:
            scripts = PartitionScripts(client)
            assert counters(scripts) == before
            assert counts(scripts) == {"pushed": 3, "claimed": 2, "finished": 2}
            assert before.waits_alone.count + before.waits_in_line.count == 2
            scripts.take()
            assert counts(scripts)["claimed"] == 3


@pytest.mark.parametrize("count", [1, 3])
def test_a_repeated_push_counts_no_message(scripts: PartitionScripts, count: int) -> None:
    messages = [OutgoingRecord(n, f"m{n}", make_record("t")) for n in range(1, count + 1)]
    for _ in range(2):
        scripts.partition.push(messages, producer="p").run(scripts.client)
    assert counts(scripts) == {"pushed": count}


def test_a_call_that_dedup_declines_is_not_pushed_and_a_replaced_one_is_dropped(
    scripts: PartitionScripts,
) -> None:
    push_keyed(scripts, "head")
    push_keyed(scripts, "declined")
    assert counts(scripts) == {"pushed": 1}
    push_keyed(scripts, "later", replace=True)
    assert counts(scripts) == {"pushed": 2, "dropped": 1}
    assert scripts.take() == ["later"]
    # Of two in one call that replace it, the first is never stored.
    push_keyed(scripts, "first", "second", replace=True, waiting=True)
    assert counts(scripts)["pushed"] == 3
    assert scripts.client.hlen(scripts.keys.messages) == 2


def test_each_attempt_of_a_full_message_counts_and_each_one_pushed_out(scripts: PartitionScripts) -> None:
    scripts.set_quota("", max_waiting=1)
    for _ in range(2):
        scripts.push("a", "b", "c")
    assert counts(scripts) == {"pushed": 1, "full": 2 + 3}
    scripts.set_quota("", max_waiting=1, when_full="discard")
    scripts.push("d")
    assert counts(scripts) == {"pushed": 2, "full": 5, "overflowed": 1, "discarded": 1}
    scripts.set_quota("", max_waiting=1, when_full="dead_letter")
    scripts.push("e")
    expected = {"pushed": 3, "full": 5, "overflowed": 2, "discarded": 2, "dead_lettered": 1}
    assert counts(scripts) == expected


def test_stale_tags_count_as_such_only(scripts: PartitionScripts) -> None:
    scripts.push("m")
    (tag,) = tags_of(scripts.claim().entries)
    assert scripts.finish(tag) == 0
    before = counts(scripts)
    assert scripts.finish(tag) == 1
    assert scripts.settle(tag) == 1
    assert scripts.release(tag) == 1
    assert before == {"pushed": 1, "claimed": 1, "finished": 1}
    assert counts(scripts) == {**before, "stale_acks": 3}


def test_each_lost_lease_counts_once(scripts: PartitionScripts) -> None:
    scripts.push("a", "b", "c")
    scripts.claim(3)
    scripts.partition.heartbeat("idle", lease_ms=1_000).run(scripts.client)
    scripts.lose()
    scripts.lose("idle")
    # The messages of a consumer are reaped in parts.
    assert [scripts.reap(limit=1) for _ in range(4)] == [1, 1, 1, 0]
    assert counts(scripts)["leases_lost"] == 2


def test_the_bounds_of_the_scripts_are_those_of_the_inspector() -> None:
    lua = Path(celery_dq.__file__).parent / "transport/redis/lua/include/waiting_times.lua"
    bounds = re.findall(r"wait < (\d+) and", lua.read_text())
    outer = re.findall(r"if wait < (\d\d+) then", lua.read_text())
    assert sorted(int(each) / 1e6 for each in bounds + outer) == list(WAIT_BOUNDS_S[:-1])


@pytest.mark.parametrize("behind", [False, True])
def test_a_wait_counts_in_the_bucket_of_its_length(scripts: PartitionScripts, behind: bool) -> None:
    """With the clock of the server, so each wait is well inside its bucket."""
    waits_s = [0.0, *(bound * 1.2 for bound in WAIT_BOUNDS_S[3:-1])]
    for n, wait_s in enumerate(waits_s):
        scripts.push(f"m{n}", priority=n % 10)
        scripts.make_older(wait_s * 1e6)
        if behind:
            scripts.push(f"other{n}", priority=0)
        (entry,) = scripts.claim(1, discards=0).entries
        assert entry.id == f"m{n}"
        scripts.finish(entry.tag)
        if behind:
            scripts.partition.cancel([f"other{n}"]).run(scripts.client)
    found = counters(scripts)
    alone, in_line = found.waits_alone, found.waits_in_line
    if behind:
        alone, in_line = in_line, alone
    assert in_line == WaitingTimes()
    # On a busy machine the first one does not wait for nothing at all.
    assert sum(alone.buckets[:4]) == 1
    assert alone.buckets[4:] == (1,) * 7
    assert alone.count == len(waits_s) == sum(alone.buckets)
    assert alone.sum_s == pytest.approx(sum(waits_s), abs=5)


@pytest.mark.parametrize("behind", [False, True])
def test_the_head_start_of_an_urgent_message_is_no_waiting_time(
    scripts: PartitionScripts, behind: bool
) -> None:
    scripts.push("old", priority=9, head_start_us=10 * 10**6)
    scripts.make_older(4e6)
    if behind:
        scripts.push("other", priority=9, head_start_us=10 * 10**6)
    assert [entry.id for entry in scripts.claim(1).entries] == ["old"]
    found = counters(scripts)
    waits = found.waits_in_line if behind else found.waits_alone
    assert waits.count == waits.buckets[WAIT_BOUNDS_S.index(10.0)] == 1
    assert waits.sum_s == pytest.approx(4, abs=2)


def test_a_message_behind_another_one_has_waited_in_line(scripts: PartitionScripts) -> None:
    scripts.push("a1", "a2", tenant="a")
    scripts.push("b", tenant="b")
    scripts.claim(3)
    assert (counters(scripts).waits_alone.count, counters(scripts).waits_in_line.count) == (1, 2)


def test_the_counters_of_a_state_stay_in_its_compact_form(scripts: PartitionScripts) -> None:
    for n in range(3):
        scripts.push(f"a{n}", f"b{n}")
        scripts.push(f"c{n}", tenant="c")
        tags = tags_of(scripts.claim(4).entries)
        scripts.settle(*tags)
        scripts.finish(*tags)
    assert scripts.client.object("encoding", scripts.keys.state) in (b"listpack", b"ziplist")


@pytest.mark.parametrize("head_start_us", [10**15, 10 * 10**6, 0])
def test_the_oldest_waiting_message_is_found_behind_more_urgent_ones(
    scripts: PartitionScripts, head_start_us: int
) -> None:
    # The first message is the oldest, at each priority.
    for priority in (0, 3, 9):
        scripts.client.flushdb()
        scripts.push("old", priority=priority, head_start_us=head_start_us)
        scripts.make_older(HOUR_S * 1e6)
        scripts.push("urgent", priority=9, head_start_us=head_start_us)
        scripts.push("other", priority=1, head_start_us=head_start_us, tenant="b")
        first, second, absent = scripts.partition.oldest_waiting(["", "b", "absent"]).run(scripts.client)
        assert first == pytest.approx(HOUR_S, abs=5)
        assert second == pytest.approx(0, abs=5)
        assert absent is None
        assert oldest_waiting_s([scripts.partition], scripts.client) == [pytest.approx(HOUR_S, abs=5)]


def test_the_oldest_message_of_a_queue_is_found_wherever_its_tenant_stands(scripts: PartitionScripts) -> None:
    assert queue_snapshot([scripts.partition], scripts.client).oldest_waiting_s is None
    scripts.push("m")
    scripts.make_older(HOUR_S * 1e6)
    for n in range(600):
        scripts.push(f"t{n}", tenant=f"t{n}")
    limits: list[dict[str, Any]] = [{"paused": True}, {"concurrency": 1}, {"rate": 0.001}, {}]
    for limit in limits:
        scripts.set_quota("", **limit)
        assert oldest_waiting_s([scripts.partition], scripts.client) == [pytest.approx(HOUR_S, abs=30)]
    assert queue_snapshot([scripts.partition], scripts.client, ages=False).oldest_waiting_s is None


@pytest.mark.parametrize(("pushed_us", "now_us"), [(10 * 10**6, 60 * 10**6), (10**15, 10 * 10**6)])
def test_a_changed_aging_costs_no_walk_through_the_backlog(
    scripts: PartitionScripts, pushed_us: int, now_us: int
) -> None:
    for n in range(50):
        scripts.push(f"m{n}", priority=5, head_start_us=pushed_us)
    scripts.push("new", priority=5, head_start_us=now_us, tenant="b")
    scripts.client.config_resetstat()
    (age,) = scripts.partition.oldest_waiting([""]).run(scripts.client)
    # Nine steps of aging are the largest error.
    assert age is not None
    assert 0 <= age <= 9 * 60
    assert scripts.client.info("commandstats")["cmdstat_hget"]["calls"] <= 12


def test_finished_messages_never_become_less(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    scripts.finish(*tags_of(scripts.claim(1).entries))
    # As if the consumer had got its lease after the snapshot has read the leases, and before the counters.
    scripts.claim(1, consumer="late")
    scripts.client.zrem(scripts.keys.leases, "late")
    assert counters(scripts).finished == 1


def test_a_damaged_field_of_waiting_times_counts_as_empty() -> None:
    assert WaitingTimes.unpack(b"short") == WaitingTimes()


def test_the_benchmark_of_the_counters_measures_scripts_without_them(scripts: PartitionScripts) -> None:
    partition = Partition(scripts.keys, without_counters(load_scripts()))
    for ids in (["single"], ["first", "second"]):  # the short path, and the general one
        scripts.push(*ids, tenant="t")
        (entry,) = partition.claim("c1", lease_ms=60_000, want=1).run(scripts.client).entries
        partition.ack("c1", settle=[entry.tag]).run(scripts.client)
        assert partition.ack("c1", finish=[entry.tag]).run(scripts.client) == 0
    assert counts(scripts).keys() == {"pushed"}
