"""The cost of a call does not depend on the number of tenants: commands are counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.transport.partition_replies import OutgoingRecord
from tests.lua.partition_scripts import PartitionScripts, make_keyed_record, make_record, tags_of

BATCH = 32


def commands(scripts: PartitionScripts) -> int:
    stats: Any = scripts.client.info("commandstats")
    return sum(each["calls"] for each in stats.values())


def fill(scripts: PartitionScripts, tenants: int, depth: int = 1) -> None:
    pipe = scripts.client.pipeline(transaction=False)
    messages = [
        OutgoingRecord(0, f"m{tenant:06d}.{i}", make_record(f"t{tenant:06d}"))
        for tenant in range(tenants)
        for i in range(depth)
    ]
    for start in range(0, len(messages), 1000):
        pipe.execute_command(*scripts.partition.push(messages[start : start + 1000]).command(full=True))
    pipe.execute()


def test_a_heartbeat_of_an_empty_partition_costs_few_commands(scripts: PartitionScripts) -> None:
    """A worker on thousands of queues sends one for each."""
    heartbeat = scripts.partition.heartbeat("c1", lease_ms=10_000)
    heartbeat.run(scripts.client)
    before = commands(scripts)
    heartbeat.run(scripts.client)
    # Two more are of the script itself and of the look at the counters.
    assert commands(scripts) - before == 9


def cost_of_a_claim(scripts: PartitionScripts) -> float:
    """Commands per claim of a batch that also finishes one."""
    tags = tags_of(scripts.claim(BATCH).entries)
    scripts.client.config_resetstat()
    for _ in range(20):
        entries = scripts.claim(BATCH, finish=tags).entries
        assert len(entries) == BATCH
        tags = tags_of(entries)
    return commands(scripts) / 20


@pytest.mark.parametrize("quota", [{}, {"rate": 1000.0, "burst": 100}, {"concurrency": 100}])
def test_claims_are_flat_from_a_thousand_to_a_hundred_thousand_tenants(
    scripts: PartitionScripts, quota: dict[str, float]
) -> None:
    costs = []
    for tenants in (1_000, 100_000):
        scripts.client.flushdb()
        for name in ("t000000", "t000001"):
            scripts.set_quota(name, **quota)
        fill(scripts, tenants)
        costs.append(cost_of_a_claim(scripts))
    assert costs[1] <= costs[0] * 1.02 + 1
    assert costs[1] <= 30 + 4 * BATCH


def test_one_tenant_costs_few_commands_a_batch(scripts: PartitionScripts) -> None:
    fill(scripts, 1, 1000)
    assert cost_of_a_claim(scripts) <= 35


def test_pushes_cost_one_command_per_tenant(scripts: PartitionScripts) -> None:
    fill(scripts, 1)
    scripts.client.config_resetstat()
    scripts.partition.push([OutgoingRecord(0, f"x{i}", make_record("t")) for i in range(BATCH)]).run(
        scripts.client
    )
    assert commands(scripts) <= 25
    scripts.client.config_resetstat()
    scripts.partition.push([OutgoingRecord(0, f"y{i}", make_record(f"t{i}")) for i in range(BATCH)]).run(
        scripts.client
    )
    assert commands(scripts) <= 25 + BATCH


def cost_of_a_push(scripts: PartitionScripts, *tenants: str) -> int:
    """Commands of a push of a message for each of these tenants, in this order."""
    sent = int(scripts.state("pushed"))
    messages = [OutgoingRecord(0, f"m{sent + n}", make_record(each)) for n, each in enumerate(tenants)]
    push = scripts.partition.push(messages)
    scripts.client.config_resetstat()
    push.run(scripts.client)
    return commands(scripts)


def test_a_bound_costs_the_pushes_of_its_partition_a_few_commands(scripts: PartitionScripts) -> None:
    for tenant in "tu":
        scripts.set_quota(tenant, weight=2)
        scripts.push(f"first {tenant}", f"second {tenant}", tenant=tenant)
    without = cost_of_a_push(scripts, "t", "t", "u")
    # As it was before there were bounds: CONFIG and INFO are counted, too.
    assert without == 13
    scripts.set_quota("other", max_waiting=1)
    assert cost_of_a_push(scripts, "t", "t", "u") == without + 1
    scripts.set_quota("t", weight=2, max_waiting=100)
    assert cost_of_a_push(scripts, "t", "t", "u") == without + 6
    scripts.set_quota("t", weight=2, max_waiting=100, when_full="discard")
    assert cost_of_a_push(scripts, "t", "t", "u") == without + 6


@pytest.mark.parametrize("keyed", [False, True])
def test_a_purge_and_a_cancellation_are_short_however_much_there_is(
    scripts: PartitionScripts, keyed: bool
) -> None:
    def fill_both() -> None:
        for n in range(1000):
            tenant = "t" if keyed else f"t{n}"
            record = make_keyed_record(tenant, f"k{n}", "", 0) if keyed else make_record(tenant)
            scripts.partition.push([OutgoingRecord(0, f"m{n}", record)]).run(scripts.client)

    fill_both()
    scripts.client.config_resetstat()
    assert scripts.partition.cancel_tenant("t").run(scripts.client).moved == (200 if keyed else 0)
    assert commands(scripts) <= 2000
    scripts.client.config_resetstat()
    assert scripts.partition.purge().run(scripts.client).more
    assert commands(scripts) <= 2000
    while scripts.partition.purge().run(scripts.client).more:
        pass
    assert scripts.left_over() - {"wake", "verdicts"} == set()


def test_throttled_tenants_are_not_looked_at(scripts: PartitionScripts) -> None:
    fill(scripts, 2_000)
    throttled = {f"t{i:06d}": scripts.now_us() + 10**9 for i in range(1_900)}
    scripts.client.zadd(scripts.keys.throttled, throttled)
    scripts.client.zrem(scripts.keys.turn, *throttled)
    scripts.claim(1)
    scripts.client.config_resetstat()
    scripts.claim(BATCH)
    assert commands(scripts) <= 30 + 4 * BATCH
