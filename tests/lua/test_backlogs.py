"""The backlogs of tenants, and the messages that may start now."""

from __future__ import annotations

from celery_dq import AnyOf
from celery_dq.inspector.backlogs import queue_backlogs
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.partition import TENANTS_PER_COUNT
from tests.lua.partition_scripts import PartitionScripts, tags_of

HOUR_US = 3_600 * 10**6


def runnable(scripts: PartitionScripts) -> int:
    return queue_backlogs([scripts.partition], scripts.client).runnable


def largest(scripts: PartitionScripts, count: int) -> dict[str, int]:
    found = queue_backlogs([scripts.partition], scripts.client, count).largest
    return {each.tenant: each.waiting for each in found}


def test_an_empty_queue_has_no_runnable_message(scripts: PartitionScripts) -> None:
    assert runnable(scripts) == 0
    assert largest(scripts, 5) == {}


def test_limits_of_a_tenant_bound_its_runnable_messages(scripts: PartitionScripts) -> None:
    scripts.set_quota("rated", 0.001, burst=3)
    scripts.set_quota("capped", concurrency=2)
    scripts.set_quota("both", 0.001, burst=4, concurrency=1)
    for tenant in ("free", "rated", "capped", "both"):
        scripts.push(*(f"{tenant}{n}" for n in range(5)), tenant=tenant)
    assert runnable(scripts) == 5 + 3 + 2 + 1


def test_the_room_of_a_resource_counts_once_for_all_its_sets(scripts: PartitionScripts) -> None:
    for resource, concurrency in (("a", 1), ("b", 2), ("c", 4)):
        scripts.set_quota(resource, concurrency=concurrency)
    for tenant in (AnyOf("a", "b"), AnyOf("b", "c"), AnyOf("a", "b", "c")):
        scripts.push(*(f"{tenant}{n}" for n in range(5)), tenant=tenant)
    assert runnable(scripts) == 1 + 2 + 4
    assert len(scripts.claim(99).entries) == 7


def test_a_set_leaves_the_room_of_a_shared_resource_to_others(scripts: PartitionScripts) -> None:
    for resource in "abc":
        scripts.set_quota(resource, concurrency=1)
    scripts.push("1", tenant=AnyOf("a", "b"))
    scripts.push("2", tenant=AnyOf("b", "c"))
    scripts.push("3", tenant=AnyOf("a", "c"))
    assert runnable(scripts) == 3


def test_a_rate_that_is_used_up_leaves_no_runnable_message(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", 0.001, burst=3)
    scripts.push(*"12345", tenant="a")
    scripts.finish(*tags_of(scripts.claim(1).entries))
    assert runnable(scripts) == 2
    scripts.finish(*tags_of(scripts.claim(2).entries))
    assert scripts.place("a") == "throttled"
    assert runnable(scripts) == 0


def test_a_throttled_tenant_counts_from_its_next_allowed_time_on(scripts: PartitionScripts) -> None:
    scripts.set_quota("a", 20)
    scripts.push("1", "2", tenant="a")
    scripts.take()
    # No consumer looks, as when no worker runs.
    wait_until(lambda: runnable(scripts) == 1, 30)
    assert scripts.place("a") == "throttled"


def test_paused_tenants_and_full_ones_have_no_runnable_message(scripts: PartitionScripts) -> None:
    scripts.set_quota("paused", paused=True)
    scripts.set_quota("full", concurrency=1)
    scripts.push("1", tenant="paused")
    scripts.push("2", "3", tenant="full")
    scripts.take()
    assert runnable(scripts) == 0


def test_a_tenant_counts_from_the_end_of_its_pause_on(scripts: PartitionScripts) -> None:
    scripts.set_quota("t", concurrency=2)
    scripts.set_quota("quota", paused=True)
    for tenant in ("t", "quota", "later", "for ever"):
        scripts.push(*(f"{tenant}{n}" for n in range(3)), tenant=tenant)
        ends = {"later": HOUR_US, "for ever": 0}.get(tenant, 200_000)
        scripts.partition.pause(tenant, for_us=ends).run(scripts.client)
    assert runnable(scripts) == 0
    # No consumer looks, as when no worker runs.
    wait_until(lambda: runnable(scripts) == 2, 30)
    assert scripts.place("t") == "paused"
    assert largest(scripts, 1).popitem()[1] == 3
    assert queue_backlogs([scripts.partition], scripts.client, 9).runnable == 2


def test_a_paused_queue_has_no_runnable_message_until_its_end(scripts: PartitionScripts) -> None:
    scripts.set_quota("slow", 100)
    scripts.push("1", "2", tenant="slow")
    scripts.take()
    scripts.push("3", "4", tenant="t")
    scripts.push("due", due_us=scripts.now_us() + HOUR_US)
    scripts.client.zadd(scripts.keys.delayed, {"due": 1})
    scripts.partition.pause(None).run(scripts.client)
    for count in (0, 5):
        assert queue_backlogs([scripts.partition], scripts.client, count).runnable == 0
    assert largest(scripts, 5) == {"t": 2, "slow": 1}
    scripts.partition.cancel(["4"]).run(scripts.client)
    assert runnable(scripts) == 1, "workers get discards in a pause"
    scripts.partition.pause(None, for_us=1_000).run(scripts.client)
    wait_until(lambda: runnable(scripts) == 1 + 1 + 1 + 1, 30)


def test_due_messages_and_discards_need_a_worker(scripts: PartitionScripts) -> None:
    scripts.push("1", "2", "later", due_us=scripts.now_us() + HOUR_US)
    assert runnable(scripts) == 0
    scripts.client.zadd(scripts.keys.delayed, {"1": 1, "2": 1})
    # However many are due, the first worker places them.
    assert runnable(scripts) == 1
    scripts.push("m")
    scripts.partition.cancel(["m"]).run(scripts.client)
    assert runnable(scripts) == 2


def test_every_eligible_tenant_counts_beyond_those_that_are_read(scripts: PartitionScripts) -> None:
    tenants = 4_000 + TENANTS_PER_COUNT
    scripts.push("a", "b", tenant="t")
    scripts.client.zadd(scripts.keys.turn, {f"t{n}": 10**9 + n for n in range(tenants - 1)})
    assert runnable(scripts) == 2 + TENANTS_PER_COUNT


def test_the_largest_backlogs_are_found_in_every_place(scripts: PartitionScripts) -> None:
    scripts.set_quota("paused", paused=True)
    scripts.set_quota("slow", 0.001)
    for n in range(2 * TENANTS_PER_COUNT):
        scripts.push(f"m{n}", tenant=f"t{n:03}")
    scripts.push(*(f"p{n}" for n in range(9)), tenant="paused")
    scripts.push(*(f"s{n}" for n in range(7)), tenant="slow")
    scripts.push(*(f"l{n}" for n in range(5)), tenant="t399")
    assert largest(scripts, 3) == {"paused": 9, "slow": 7, "t399": 6}
    assert len(largest(scripts, 150)) == 150
    found = queue_backlogs([scripts.partition], scripts.client, 1).largest[0]
    assert (found.queue, found.state) == ("push", "paused")
    assert 0 <= (found.oldest_waiting_s or -1) < 60
