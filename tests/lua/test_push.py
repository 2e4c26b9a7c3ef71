from __future__ import annotations

from collections.abc import Sequence

import pytest
from redis.exceptions import ResponseError

from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord, PushReply
from tests.lua.partition_scripts import PartitionScripts, make_record


def send(
    scripts: PartitionScripts, sequences: Sequence[int], producer: str = "p", ttl_ms: int = 60_000
) -> list[PushReply]:
    messages = [OutgoingRecord(n, f"m{n}", make_record()) for n in sequences]
    return scripts.partition.push(messages, producer=producer, marker_ttl_ms=ttl_ms).run(scripts.client)


def test_messages_of_one_call_keep_their_order(scripts: PartitionScripts) -> None:
    ids = [f"{(i * 7919) % 1000:03d}" for i in range(200)]
    scripts.push(*ids)
    assert scripts.take(200) == ids


def test_the_order_holds_over_calls_in_one_microsecond(scripts: PartitionScripts) -> None:
    for i in range(50):
        scripts.push(f"{i * 37 % 50:02d}")
    assert scripts.take(50) == [f"{i * 37 % 50:02d}" for i in range(50)]


def test_marker_expires(scripts: PartitionScripts) -> None:
    send(scripts, [1], ttl_ms=5000)
    assert 0 < scripts.client.pttl(scripts.keys.producer("p")) <= 5000


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (
            [OutgoingRecord(1, "a", make_record()), OutgoingRecord(2, "b", b"short")],
            "record 2 cannot be read",
        ),
        ([OutgoingRecord(1, "a", b"\x02" + make_record()[1:])], "record 1 cannot be read"),
        ([OutgoingRecord(1, "a", make_record(priority=10))], "record 1 cannot be read"),
        ([OutgoingRecord(1, "a", make_record(due_us=-1))], "record 1 cannot be read"),
        ([OutgoingRecord(1, "a", make_record("tenant")[:30])], "record 1 cannot be read"),
        (
            [OutgoingRecord(2, "a", make_record()), OutgoingRecord(2, "b", make_record())],
            "sequence 2 does not ascend",
        ),
    ],
)
def test_nothing_is_written_when_anything_is_wrong(
    scripts: PartitionScripts, messages: list[OutgoingRecord], complaint: str
) -> None:
    with pytest.raises(ResponseError, match=complaint):
        scripts.partition.push(messages, producer="p").run(scripts.client)
    assert scripts.client.keys("*") == []


def test_not_a_number_as_due_time_is_refused(scripts: PartitionScripts) -> None:
    with pytest.raises(ResponseError, match="record 1"):
        scripts.push("a", due_us=float("nan"))


def test_strict_priority_outlives_any_wait(scripts: PartitionScripts) -> None:
    scripts.push("low")
    year_us = 365 * 24 * 3600 * 1_000_000
    scripts.make_older(20 * year_us)
    scripts.push("high", priority=1)
    assert scripts.take(2) == ["high", "low"]


def test_aged_priority_lets_an_old_message_go(scripts: PartitionScripts) -> None:
    head_start_us = 50_000
    scripts.push("old", head_start_us=head_start_us)
    scripts.make_older(9 * head_start_us)
    scripts.push("urgent", priority=9, head_start_us=head_start_us)
    scripts.push("new", head_start_us=head_start_us)
    assert scripts.take(3) == ["old", "urgent", "new"]


def test_record_comes_back_byte_by_byte(scripts: PartitionScripts) -> None:
    body = bytes(range(256))
    scripts.push("a", tenant="ärger", body=body)
    assert scripts.claim().entries[0].record == make_record("ärger", body=body)


def test_large_batch(scripts: PartitionScripts) -> None:
    messages = [OutgoingRecord(n, f"m{n}", make_record(f"t{n}")) for n in range(1000)]
    assert len(scripts.partition.push(messages).run(scripts.client)) == 1000
    assert len(scripts.take(1000)) == 1000


def counted(record: bytes) -> bytes:
    """The record with the flag of a countdown."""
    return record[:2] + bytes((record[2] | 4,)) + record[3:]


@pytest.mark.parametrize("ahead_us", [-(10**9), 0, 10**9], ids=["behind", "right", "ahead"])
def test_a_countdown_is_due_by_the_clock_of_redis(scripts: PartitionScripts, ahead_us: int) -> None:
    now_us = scripts.now_us()
    record = counted(make_record("t", due_us=now_us + ahead_us + 60_000_000, priority=3))
    push = scripts.partition.push([OutgoingRecord(1, "a", record)], wall_us=now_us + ahead_us)
    push.run(scripts.client)
    due_us = scripts.client.zscore(scripts.keys.delayed, "a")
    assert now_us + 60_000_000 <= due_us <= scripts.now_us() + 60_000_000
    stored = MessageRecord.unpack(scripts.client.hget(scripts.keys.messages, "a"))
    assert (stored.counted, stored.due_us) == (False, due_us)
    assert (stored.tenant, stored.priority, stored.body) == ("t", 3, b"[]")


def test_a_countdown_that_is_over_may_run_at_once(scripts: PartitionScripts) -> None:
    now_us = scripts.now_us()
    record = counted(make_record(due_us=now_us))
    scripts.partition.push([OutgoingRecord(1, "a", record)], wall_us=now_us + 10**15).run(scripts.client)
    assert scripts.take() == ["a"]


@pytest.mark.parametrize("wall_us", [-1, 9e15])
def test_a_clock_out_of_range_is_refused(scripts: PartitionScripts, wall_us: float) -> None:
    with pytest.raises(ResponseError, match="DQINVALID push: wall_us must be from 0 to 9e15"):
        scripts.partition.push([OutgoingRecord(1, "a", make_record())], wall_us=wall_us).run(scripts.client)  # type: ignore[arg-type]
