"""A heavy tenant in several partitions of its queue."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.options import Quota
from celery_dq.transport.redis.store.partition_map import PartitionMap
from tests.integration.partitioned_shop import A, B, opened
from tests.integration.shop import send
from tests.integration.spread_world import HEAVY, SpreadWorld
from tests.integration.test_quotas_during_changes import limits


def counts(app: Any, tenant: str) -> dict[int, int]:
    """The waiting messages of a tenant in each partition that has some."""
    with opened(app) as (partitions, client):
        found = {}
        for each in partitions:
            waiting = client.zcard(each.keys.tenant(tenant)) + int(client.hexists(each.keys.single, tenant))
            if waiting:
                found[each.keys.partition] = waiting
        return found


def test_a_spread_tenant_has_its_messages_in_its_partitions(wide: Any) -> None:
    send(wide, *[A] * 30)
    send(wide, *[B] * 3)
    assert counts(wide, A) == {0: 30}
    quota = wide.dq.quotas.set("push", A, rate=100, burst=8, concurrency=8, spread=3)
    assert quota == Quota(rate=100, burst=8, concurrency=8, spread=3)
    shares = PartitionMap(4).begin_spread(A, 3).partitions(A)
    assert set(counts(wide, A)) == set(shares)
    assert sum(counts(wide, A).values()) == 30
    send(wide, *[A] * 60)
    found = counts(wide, A)
    assert (set(found), sum(found.values())) == (set(shares), 90)
    assert min(found.values()) > 10
    assert sum(counts(wide, B).values()) == 3
    with opened(wide) as (partitions, client):
        explained = [partitions[number].explain_tenant(A).run(client) for number in shares]
        assert [int(each["concurrency"]) for each in explained] == [3, 3, 2]
        assert {each["interval_us"] for each in explained} == {"30000"}
    assert wide.dq.quotas.list("push") == {A: quota}
    wide.dq.quotas.remove("push", A)
    assert counts(wide, A) == {0: 90}
    with opened(wide) as (partitions, client):
        assert [client.hlen(each.keys.quotas) for each in partitions] == [0] * 4


@pytest.mark.parametrize("seed", range(2))
def test_changes_of_the_spread_lose_double_and_reorder_nothing(wide: Any, seed: int) -> None:
    world = SpreadWorld(wide, wide.conf.broker_url.removeprefix("dq-"), seed)
    publish = (world.publish, world.publish_keyed)
    others = (world.claim, world.end, world.cancel, world.set_quota)
    steps: list[int | tuple[str, int]] = [
        (HEAVY[0], 4),
        (HEAVY[1], 3),
        7,
        (HEAVY[0], 2),
        4,
        (HEAVY[0], 1),
        (HEAVY[1], 2),
    ]
    try:
        for _ in range(20):
            world.publish()
            world.publish_keyed()
        for step in steps:
            kills = 1
            while not world.step(step, world.random.randint(1, 60) if kills < 5 else None):
                kills += 1
                for _ in range(3):
                    world.random.choice((*publish, *publish, *others))()
                if kills > 5:
                    world.claim()
                    world.end()
                assert kills < 200, "the change does not end"
        world.drain()
        assert world.verdict() == {"lost": [], "doubled": [], "disordered": [], "revoked": []}
        assert world.kills >= 10
        now = wide.dq.queues["push"].snapshot()
        assert (now.waiting, now.held, now.delayed) == (0, 0, len(world.delayed))
        assert {HEAVY[1]: Quota(concurrency=8, spread=2)}.items() <= wide.dq.quotas.list("push").items()
        assert [sum(limits(wide, tenant)) for tenant in HEAVY] == [8, 8, 8]
    finally:
        world.kombu.close()
