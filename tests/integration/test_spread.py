"""A heavy tenant in several partitions of its queue."""

from __future__ import annotations

from typing import Any

from celery_dq.options import Quota
from celery_dq.transport.redis.store.home import shares_of
from tests.integration.partitioned_shop import A, B, opened
from tests.integration.shop import send


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
    shares = shares_of(A, 4, 3)
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
