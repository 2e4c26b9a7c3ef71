"""Messages that any of several tenants may take: the claim chooses one with room."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from celery_dq import AnyOf
from tests.lua.partition_scripts import PartitionScripts

A_B = AnyOf("a", "b")
A_B_C = AnyOf("a", "b", "c")


def taken(scripts: PartitionScripts, want: int = 10, consumer: str = "c1") -> list[tuple[str, str]]:
    """Claim messages; return their ids with the resources that have taken them."""
    return [(each.id, each.resource) for each in scripts.claim(want, consumer).entries]


def test_each_resource_takes_as_many_messages_as_it_has_room_for(scripts: PartitionScripts) -> None:
    for resource, concurrency in (("a", 1), ("b", 2), ("c", 3)):
        scripts.set_quota(resource, concurrency=concurrency)
    scripts.push(*(f"m{i}" for i in range(10)), tenant=A_B_C)
    claimed = taken(scripts)
    assert [each for each, _ in claimed] == [f"m{i}" for i in range(6)]
    assert Counter(resource for _, resource in claimed) == {"a": 1, "b": 2, "c": 3}
    assert [scripts.slots(each) for each in "abc"] == [1, 2, 3]
    assert taken(scripts) == []


def test_the_resource_that_ends_a_message_takes_the_next_one(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", concurrency=1)
    scripts.set_quota("b", concurrency=1)
    scripts.push("m0", "m1", "m2", "m3", tenant=A_B)
    first = scripts.claim(10).entries
    fast = next(each for each in first if each.resource == "b")
    scripts.finish(fast.tag)
    assert scripts.token()
    (second,) = scripts.claim(10).entries
    assert (second.id, second.resource) == ("m2", "b")
    scripts.settle(second.tag)
    assert taken(scripts) == []  # a settled message keeps its slot
    scripts.finish(second.tag)
    assert taken(scripts) == [("m3", "b")]


def test_a_resource_whose_set_was_emptied_needs_no_slot(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", concurrency=1)
    scripts.set_quota("b", concurrency=1)
    scripts.push("m0", tenant=A_B)
    scripts.push("n0", "n1", tenant="other")
    claimed = scripts.claim(10, free=1)
    assert [each.id for each in claimed.entries] == ["m0", "n0", "n1"]
    assert not claimed.needs_slot


def test_a_paused_resource_takes_nothing_and_the_others_do(scripts: PartitionScripts) -> None:
    scripts.partition.pause("a").run(scripts.client)
    scripts.push("m0", "m1", tenant=A_B)
    assert taken(scripts) == [("m0", "b"), ("m1", "b")]


@pytest.mark.parametrize("how", ["cancel", "cancel_tenant", "purge", "take"])
def test_resources_leave_the_turn_with_the_last_message_of_their_set(
    scripts: PartitionScripts, how: str
) -> None:
    scripts.push("m0", tenant=A_B)
    assert scripts.place("a") == "turn"
    calls: dict[str, Any] = {
        "cancel": scripts.partition.cancel(["m0"]),
        "cancel_tenant": scripts.partition.cancel_tenant(A_B, reason="gone"),
        "purge": scripts.partition.purge(),
        "take": scripts.partition.take("mover", ["m0"], lease_ms=1000),
    }
    calls[how].run(scripts.client)
    assert scripts.place("a") == scripts.place("b") == scripts.place(A_B) == "idle"
    assert scripts.state("sets") == 0


def test_a_dead_letter_belongs_to_the_set_and_is_replayed_to_it(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", concurrency=1)
    scripts.push("m0", tenant=A_B)
    (entry,) = scripts.claim(1).entries
    scripts.partition.dead_letter("c1", entry.tag, reason="failed", worker="w").run(scripts.client)
    assert b'"tenant":"any_of(a,b)"' in scripts.client.hget(scripts.keys.dead_info, "m0")
    assert scripts.slots(entry.resource) == 0
    scripts.partition.replay("m0").run(scripts.client)
    assert scripts.place(A_B) == "resource_sets"
    assert [each for each, _ in taken(scripts)] == ["m0"]


def test_a_message_in_flight_is_located_with_its_resource(scripts: PartitionScripts) -> None:
    scripts.push("m0", tenant=A_B)
    (entry,) = scripts.claim(1).entries
    found = scripts.partition.locate("m0").run(scripts.client)
    assert (found["tenant"], found["resource"]) == (A_B, entry.resource)


def test_a_lost_count_of_sets_is_repaired_by_the_next_message(scripts: PartitionScripts) -> None:
    scripts.push("m0", tenant=A_B)
    scripts.client.hset(scripts.keys.state, "sets", 0)
    assert taken(scripts) == []
    scripts.push("m1", tenant=A_B)
    assert [each for each, _ in taken(scripts)] == ["m0", "m1"]
