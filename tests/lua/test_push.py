from __future__ import annotations

from collections.abc import Sequence

import pytest
from redis.exceptions import ResponseError

from celery_dq.transport.redis.replies import Outgoing, Pushed
from tests.lua.desk import Desk, make_record


def send(desk: Desk, sequences: Sequence[int], producer: str = "p", ttl_ms: int = 60_000) -> list[Pushed]:
    messages = [Outgoing(n, f"m{n}", make_record()) for n in sequences]
    return desk.partition.push(messages, producer=producer, marker_ttl_ms=ttl_ms).run(desk.client)


def test_messages_of_one_call_keep_their_order(desk: Desk) -> None:
    ids = [f"{(i * 7919) % 1000:03d}" for i in range(200)]
    desk.push(*ids)
    assert desk.take(200) == ids


def test_the_order_holds_over_calls_in_one_microsecond(desk: Desk) -> None:
    for i in range(50):
        desk.push(f"{i * 37 % 50:02d}")
    assert desk.take(50) == [f"{i * 37 % 50:02d}" for i in range(50)]


def test_resent_batch_changes_nothing(desk: Desk) -> None:
    assert send(desk, [1, 2]) == [Pushed("accepted", "m1"), Pushed("accepted", "m2")]
    assert send(desk, [1, 2, 3]) == [Pushed("seen", "m1"), Pushed("seen", "m2"), Pushed("accepted", "m3")]
    assert desk.waiting() == ["m1", "m2", "m3"]
    assert send(desk, [3], producer="q") == [Pushed("accepted", "m3~1")]


def test_resent_batch_changes_nothing_after_its_messages_have_finished(desk: Desk) -> None:
    send(desk, [1])
    desk.finish(desk.claim().entries[0].tag)
    assert send(desk, [1]) == [Pushed("seen", "m1")]
    assert desk.take() == []


def test_marker_expires(desk: Desk) -> None:
    send(desk, [1], ttl_ms=5000)
    assert 0 < desk.client.pttl(desk.keys.producer("p")) <= 5000


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([Outgoing(1, "a", make_record()), Outgoing(2, "b", b"short")], "record 2 cannot be read"),
        ([Outgoing(1, "a", b"\x02" + make_record()[1:])], "record 1 cannot be read"),
        ([Outgoing(1, "a", make_record(priority=10))], "record 1 cannot be read"),
        ([Outgoing(1, "a", make_record(due_us=-1))], "record 1 cannot be read"),
        ([Outgoing(1, "a", make_record("tenant")[:30])], "record 1 cannot be read"),
        ([Outgoing(2, "a", make_record()), Outgoing(2, "b", make_record())], "sequence 2 does not ascend"),
    ],
)
def test_nothing_is_written_when_anything_is_wrong(
    desk: Desk, messages: list[Outgoing], complaint: str
) -> None:
    with pytest.raises(ResponseError, match=complaint):
        desk.partition.push(messages, producer="p").run(desk.client)
    assert desk.client.keys("*") == []


def test_not_a_number_as_due_time_is_refused(desk: Desk) -> None:
    with pytest.raises(ResponseError, match="record 1"):
        desk.push("a", due_us=float("nan"))


def test_taken_ids_get_a_suffix(desk: Desk) -> None:
    assert [desk.push_one("a") for _ in range(3)] == ["a", "a~1", "a~2"]
    assert [each.id for each in desk.push("a", "a")] == ["a~3", "a~4"]
    for _ in range(5):
        desk.push("a")
    assert desk.push_one("a").startswith("a~1")
    assert len(set(desk.waiting())) == 11


def test_settled_message_keeps_its_id(desk: Desk) -> None:
    """A retry is pushed with the same task id while its first run is settled, not finished."""
    desk.push("a")
    first = desk.claim().entries[0]
    desk.settle(first.tag)
    assert desk.push_one("a") == "a~1"
    second = desk.claim().entries[0]
    assert desk.finish(first.tag) == 0
    assert desk.finish(second.tag) == 0
    assert desk.left_over() == {"leases"}


def test_a_tilde_in_a_task_id_is_no_suffix(desk: Desk) -> None:
    assert desk.push_one("a~1") == "a~~1"
    assert desk.push_one("a") == "a"
    assert desk.push_one("a") == "a~1"
    assert desk.partition.cancel(["a"]).run(desk.client) == ["waiting"]
    assert desk.take(3) == ["a", "a~1", "a~~1"]


def test_priority_goes_first_inside_its_tenant(desk: Desk) -> None:
    for priority in (0, 9, 5, 9):
        desk.push(f"p{priority}", priority=priority)
    assert desk.take(4) == ["p9", "p9~1", "p5", "p0"]


def test_strict_priority_outlives_any_wait(desk: Desk) -> None:
    desk.push("low")
    year_us = 365 * 24 * 3600 * 1_000_000
    desk.make_older(20 * year_us)
    desk.push("high", priority=1)
    assert desk.take(2) == ["high", "low"]


def test_aged_priority_lets_an_old_message_go(desk: Desk) -> None:
    head_start_us = 50_000
    desk.push("old", head_start_us=head_start_us)
    desk.make_older(9 * head_start_us)
    desk.push("urgent", priority=9, head_start_us=head_start_us)
    desk.push("new", head_start_us=head_start_us)
    assert desk.take(3) == ["old", "urgent", "new"]


def test_delayed_message_waits_until_it_is_due(desk: Desk) -> None:
    desk.push("later", due_us=desk.now_us() + 60_000_000, priority=9)
    desk.push("past", due_us=desk.now_us() - 1)
    assert desk.take(2) == ["past"]
    desk.client.zadd(desk.keys.delayed, {"later": desk.now_us() - 10})
    desk.push("now", priority=9)
    assert desk.take(2) == ["later", "now"]


def test_record_comes_back_byte_by_byte(desk: Desk) -> None:
    body = bytes(range(256))
    desk.push("a", tenant="ärger", body=body)
    assert desk.claim().entries[0].record == make_record("ärger", body=body)


def test_large_batch(desk: Desk) -> None:
    messages = [Outgoing(n, f"m{n}", make_record(f"t{n}")) for n in range(1000)]
    assert len(desk.partition.push(messages).run(desk.client)) == 1000
    assert len(desk.take(1000)) == 1000
