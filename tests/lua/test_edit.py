"""Another due time or priority for a message that waits or is delayed."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from celery_dq.transport.message_record import MessageRecord
from tests.lua.partition_scripts import PartitionScripts

HOUR_US = 3_600_000_000


def edit(scripts: PartitionScripts, task_id: str, **changes: Any) -> str:
    return scripts.partition.edit(task_id, **changes).run(scripts.client)


def record(scripts: PartitionScripts, task_id: str) -> MessageRecord:
    return MessageRecord.unpack(scripts.client.hget(scripts.keys.messages, task_id))


def test_a_waiting_message_is_delayed_and_its_tenant_leaves_the_line(scripts: PartitionScripts) -> None:
    scripts.push("a", tenant="t", priority=3)
    due = scripts.now_us() + HOUR_US
    assert edit(scripts, "a", due_us=due) == "delayed"
    assert (scripts.place("t"), scripts.take(5)) == ("idle", [])
    found = record(scripts, "a")
    assert (found.due_us, found.priority, found.tenant) == (due, 3, "t")
    assert edit(scripts, "a", for_us=0) == "delayed"
    assert scripts.token()
    assert scripts.take(5) == ["a"]


def test_a_due_time_in_the_past_gives_no_earlier_place(scripts: PartitionScripts) -> None:
    scripts.push("a", due_us=scripts.now_us() + HOUR_US)
    scripts.push("b")
    edit(scripts, "a", due_us=1)
    edit(scripts, "b", due_us=1)
    assert scripts.take(5) == ["b", "a"]


def test_a_sooner_due_time_wakes_a_consumer_to_plan_the_look(scripts: PartitionScripts) -> None:
    scripts.push("a", due_us=scripts.now_us() + 2 * HOUR_US)
    scripts.claim(5)
    assert not scripts.token()
    edit(scripts, "a", for_us=HOUR_US)
    assert scripts.take_token()
    look_s = scripts.claim(5).next_look_s
    assert look_s is not None
    assert look_s <= 3_600


@pytest.mark.parametrize("changes", [{"due_us": -1}, {"due_us": 10**16}, {"priority": 10}, {"priority": -1}])
def test_an_impossible_change_is_refused(scripts: PartitionScripts, changes: dict[str, int]) -> None:
    scripts.push("a")
    with pytest.raises(redis.ResponseError, match="DQINVALID edit"):
        edit(scripts, "a", **changes)


def test_a_record_is_replaced_only_if_it_is_the_one_that_was_read(scripts: PartitionScripts) -> None:
    scripts.push("a", "b")
    before = scripts.client.hget(scripts.keys.messages, "a")
    after = before.replace(b"[]", b"[7]")
    assert scripts.partition.edit_record("a", b"other", after).run(scripts.client) == "other"
    assert scripts.partition.edit_record("a", before, after).run(scripts.client) == "waiting"
    assert scripts.client.hget(scripts.keys.messages, "a") == after
    scripts.claim(1)
    assert scripts.partition.edit_record("a", after, before).run(scripts.client) == "other"
    assert scripts.client.hget(scripts.keys.messages, "a") == after
    assert scripts.partition.edit_record("none", after, before).run(scripts.client) == "none"
