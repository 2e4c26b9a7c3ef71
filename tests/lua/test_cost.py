"""What a call costs does not depend on how many tenants there are: commands are counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.transport.redis.replies import Outgoing
from tests.lua.desk import Desk, make_record, tags_of

BATCH = 32


def commands(desk: Desk) -> int:
    stats: Any = desk.client.info("commandstats")
    return sum(each["calls"] for each in stats.values())


def fill(desk: Desk, tenants: int, depth: int = 1) -> None:
    pipe = desk.client.pipeline(transaction=False)
    messages = [
        Outgoing(0, f"m{tenant:06d}.{i}", make_record(f"t{tenant:06d}"))
        for tenant in range(tenants)
        for i in range(depth)
    ]
    for start in range(0, len(messages), 1000):
        pipe.execute_command(*desk.partition.push(messages[start : start + 1000]).command(full=True))
    pipe.execute()


def cost_of_a_claim(desk: Desk) -> float:
    """Commands per claim of a batch that also finishes one."""
    tags = tags_of(desk.claim(BATCH).entries)
    desk.client.config_resetstat()
    for _ in range(20):
        entries = desk.claim(BATCH, finish=tags).entries
        assert len(entries) == BATCH
        tags = tags_of(entries)
    return commands(desk) / 20


@pytest.mark.parametrize("quota", [{}, {"rate": 1000.0, "burst": 100}, {"concurrency": 100}])
def test_claims_are_flat_from_a_thousand_to_a_hundred_thousand_tenants(
    desk: Desk, quota: dict[str, float]
) -> None:
    costs = []
    for tenants in (1_000, 100_000):
        desk.client.flushdb()
        for name in ("t000000", "t000001"):
            desk.set_quota(name, **quota)
        fill(desk, tenants)
        costs.append(cost_of_a_claim(desk))
    assert costs[1] <= costs[0] * 1.02 + 1
    assert costs[1] <= 30 + 4 * BATCH


def test_one_tenant_costs_few_commands_a_batch(desk: Desk) -> None:
    fill(desk, 1, 1000)
    assert cost_of_a_claim(desk) <= 35


def test_pushes_cost_one_command_per_tenant(desk: Desk) -> None:
    fill(desk, 1)
    desk.client.config_resetstat()
    desk.partition.push([Outgoing(0, f"x{i}", make_record("t")) for i in range(BATCH)]).run(desk.client)
    assert commands(desk) <= 25
    desk.client.config_resetstat()
    desk.partition.push([Outgoing(0, f"y{i}", make_record(f"t{i}")) for i in range(BATCH)]).run(desk.client)
    assert commands(desk) <= 25 + BATCH


def test_throttled_tenants_are_not_looked_at(desk: Desk) -> None:
    fill(desk, 2_000)
    throttled = {f"t{i:06d}": desk.now_us() + 10**9 for i in range(1_900)}
    desk.client.zadd(desk.keys.throttled, throttled)
    desk.client.zrem(desk.keys.turn, *throttled)
    desk.claim(1)
    desk.client.config_resetstat()
    desk.claim(BATCH)
    assert commands(desk) <= 30 + 4 * BATCH
