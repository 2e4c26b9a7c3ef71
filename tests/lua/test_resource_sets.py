"""Messages that any of several tenants may take: the claim chooses one with room."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from celery_dq import AnyOf
from tests.lua.partition_scripts import PartitionScripts, tags_of

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


def test_a_change_of_a_capacity_acts_at_once(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", concurrency=1)
    scripts.set_quota("b", concurrency=1)
    scripts.push(*(f"m{i}" for i in range(6)), tenant=A_B)
    assert len(taken(scripts)) == 2
    scripts.set_quota("b", concurrency=3)
    assert scripts.token()
    assert taken(scripts) == [("m2", "b"), ("m3", "b")]
    scripts.set_quota("b", concurrency=1)
    assert taken(scripts) == []


def test_a_paused_resource_takes_nothing_and_the_others_do(scripts: PartitionScripts) -> None:
    scripts.partition.pause("a").run(scripts.client)
    scripts.push("m0", "m1", tenant=A_B)
    assert taken(scripts) == [("m0", "b"), ("m1", "b")]


def test_messages_wait_while_all_resources_are_paused(scripts: PartitionScripts) -> None:
    for each in "ab":
        scripts.partition.pause(each).run(scripts.client)
    scripts.push("m0", tenant=A_B)
    assert taken(scripts) == []
    scripts.partition.resume("b").run(scripts.client)
    assert scripts.token()
    assert taken(scripts) == [("m0", "b")]


def test_the_rate_of_the_resource_is_charged(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", 0.01, burst=1)
    scripts.set_quota("b", 0.01, burst=2)
    scripts.push("m0", "m1", "m2", "m3", tenant=A_B)
    assert Counter(resource for _, resource in taken(scripts)) == {"a": 1, "b": 2}
    assert [scripts.place(each) for each in "ab"] == ["throttled", "throttled"]


def test_resources_without_a_limit_take_turns(scripts: PartitionScripts) -> None:
    scripts.push("m0", "m1", "m2", "m3", tenant=A_B)
    assert [resource for _, resource in taken(scripts)] == ["a", "b", "a", "b"]
    assert scripts.place("a") == scripts.place("b") == "idle"


def test_a_resource_serves_its_own_messages_and_those_of_its_sets_in_turns(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", concurrency=1)
    scripts.partition.pause("b").run(scripts.client)
    scripts.partition.pause("c").run(scripts.client)
    scripts.push("m0", "m1", "m2", tenant=A_B)
    scripts.push("n0", "n1", "n2", tenant=A_B_C)
    scripts.push("o0", "o1", "o2", tenant="a")
    order = []
    while entries := scripts.claim(10).entries:
        order += [each.id for each in entries]
        scripts.finish(*tags_of(entries))
    assert sorted(order[:3], key=lambda each: each[0]) == ["m0", "n0", "o0"]
    assert sorted(order[3:6], key=lambda each: each[0]) == ["m1", "n1", "o1"]
    assert len(order) == 9


def test_the_backlogs_of_a_resource_take_turns_within_a_claim(scripts: PartitionScripts) -> None:
    scripts.partition.pause("b").run(scripts.client)
    scripts.push("m0", "m1", tenant=A_B)
    scripts.push("o0", "o1", tenant="a")
    assert [each for each, _ in taken(scripts)] == ["o0", "m0", "o1", "m1"]


def test_a_suspect_of_a_set_keeps_no_other_message_from_its_resources(scripts: PartitionScripts) -> None:
    scripts.push("m0", tenant=A_B)
    scripts.push("o0", "o1", tenant="a")
    scripts.push("n0", tenant=A_B_C)
    scripts.client.hset(scripts.keys.deliveries, "m0", 1)
    # A consumer that has a suspect takes no second one, for as long as its task runs.
    assert {each.id for each in scripts.claim(10, suspects=False).entries} == {"o0", "o1", "n0"}
    assert [each for each, _ in taken(scripts)] == ["m0"]


def test_a_single_message_of_a_resource_takes_its_turn(scripts: PartitionScripts) -> None:
    scripts.claim(0)  # with a lease, a claim of a single message may be a plain one
    scripts.push("m0", "m1", "m2", tenant=A_B)
    scripts.push("o0", tenant="a")
    assert taken(scripts, 1) + taken(scripts, 1) == [("o0", ""), ("m0", "b")]
    scripts.push("o1", tenant="a")
    assert taken(scripts, 1) == [("m1", "a")]


def test_the_last_message_of_a_set_takes_all_its_resources_out_of_turn(scripts: PartitionScripts) -> None:
    scripts.push("m0", tenant=A_B)
    assert taken(scripts, 1) == [("m0", "a")]
    assert scripts.place("a") == scripts.place("b") == "idle"


def test_a_backlog_of_a_set_leaves_the_turns_of_other_tenants(scripts: PartitionScripts) -> None:
    scripts.push(*(f"m{i}" for i in range(50)), tenant=A_B)
    scripts.push("n0", "n1", tenant="quiet")
    first = [each for each, _ in taken(scripts, 6)]
    assert {"n0", "n1"} <= set(first)


def test_priorities_hold_in_a_set(scripts: PartitionScripts) -> None:
    scripts.push("low", tenant=A_B)
    scripts.push("urgent", tenant=A_B, priority=9)
    assert [each for each, _ in taken(scripts, 1)] == ["urgent"]


@pytest.mark.parametrize("mode", ["unstarted", "requeue", "crashed"])
def test_a_released_message_waits_for_any_of_its_resources_again(
    scripts: PartitionScripts, mode: str
) -> None:
    scripts.set_quota("a", concurrency=1)
    scripts.set_quota("b", concurrency=1)
    scripts.push("m0", "m1", "m2", tenant=A_B)
    first, second = scripts.claim(2).entries
    scripts.release(first.tag, mode=mode)
    scripts.partition.pause(first.resource).run(scripts.client)
    assert scripts.slots(first.resource) == 0
    scripts.finish(second.tag)
    assert taken(scripts, 1) == [("m0", second.resource)]


def test_the_slots_of_a_lost_consumer_are_free_again(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", concurrency=1)
    scripts.set_quota("b", concurrency=1)
    scripts.push("m0", "m1", "m2", tenant=A_B)
    scripts.claim(2)
    scripts.lose()
    assert scripts.reap() == 2
    assert scripts.slots("a") == scripts.slots("b") == 0
    assert {each for each, _ in taken(scripts, 1, "c2") + taken(scripts, 1, "c3")} == {"m0", "m1"}


def test_a_refused_rate_gets_its_permit_back(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", 0.01, burst=1)
    scripts.partition.pause("b").run(scripts.client)
    scripts.push("m0", tenant=A_B)
    scripts.release(*tags_of(scripts.claim(1).entries))
    assert [each for each, _ in taken(scripts)] == ["m0"]


def test_nothing_is_left_of_a_set_without_messages(scripts: PartitionScripts) -> None:
    scripts.push("m0", "m1", tenant=A_B)
    scripts.push("n0", tenant="a")
    scripts.finish(*tags_of(scripts.claim(10).entries))
    assert scripts.state("sets") == 0
    assert scripts.left_over() <= {"wake", "leases"}


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


def test_a_delayed_message_of_a_set_is_taken_when_it_is_due(scripts: PartitionScripts) -> None:
    scripts.push("m0", tenant=A_B, due_us=scripts.now_us() + 60_000_000)
    assert taken(scripts) == []
    scripts.client.zadd(scripts.keys.delayed, {"m0": 1})
    assert [each for each, _ in taken(scripts)] == ["m0"]


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


def test_a_consumer_without_free_slots_for_limited_tenants_takes_none(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", concurrency=5)
    scripts.set_quota("b", concurrency=5)
    scripts.push("m0", tenant=A_B)
    assert scripts.claim(5, free=0).entries == []
    assert len(scripts.claim(5).entries) == 1


def test_a_lost_count_of_sets_is_repaired_by_the_next_message(scripts: PartitionScripts) -> None:
    scripts.push("m0", tenant=A_B)
    scripts.client.hset(scripts.keys.state, "sets", 0)
    assert taken(scripts) == []
    scripts.push("m1", tenant=A_B)
    assert [each for each, _ in taken(scripts)] == ["m0", "m1"]
