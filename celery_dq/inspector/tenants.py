"""Whose work waits, and what holds it back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from celery_dq.inspector.reading import Client, moment, scan, text
from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA, quota_field
from celery_dq.options import Quota
from celery_dq.options.quota import UNLIMITED
from celery_dq.transport.redis.partition import Partition

TenantState: TypeAlias = Literal["eligible", "throttled", "limited", "paused", "idle"]


@dataclass(frozen=True)
class TenantSnapshot:
    """How a tenant stands in a queue.

    :param state: ``eligible`` (served when its turn comes), ``throttled`` (waits for its rate),
        ``limited`` (waits for its concurrency), ``paused``, or ``idle`` (nothing waits).
    :param waiting: its messages that wait; delayed ones are not counted.
    :param running: slots that its messages take: those in workers' hands.
    :param until: when its next token is due; None unless throttled.
    :param quota: what is in force for it.
    """

    tenant: str
    state: TenantState
    waiting: int
    running: int
    until: datetime | None
    quota: Quota


def list_tenants(partition: Partition, client: Client, limit: int = 100) -> list[TenantSnapshot]:
    """Read the tenants that have a backlog: the eligible ones in order of turn, then those held back."""
    keys = partition.keys
    found: dict[str, tuple[TenantState, datetime | None]] = {}
    states: tuple[tuple[TenantState, str], ...] = (
        ("eligible", keys.turn),
        ("throttled", keys.throttled),
        ("limited", keys.limited),
        ("paused", keys.parked),
    )
    for state, key in states:
        left = limit - len(found)
        if left <= 0:
            break
        for member, score in client.zrange(key, 0, left - 1, withscores=True):
            found.setdefault(text(member), (state, moment(score) if state == "throttled" else None))
    return _described(partition, client, found)


def tenant_snapshot(partition: Partition, client: Client, tenant: str) -> TenantSnapshot:
    """Read how one tenant stands."""
    keys = partition.keys
    pipeline = client.pipeline(transaction=True)
    for key in (keys.turn, keys.throttled, keys.limited, keys.parked):
        pipeline.zscore(key, tenant)
    turn, throttled, limited, parked = pipeline.execute()
    state: TenantState = "idle"
    if parked is not None:
        state = "paused"
    elif limited is not None:
        state = "limited"
    elif throttled is not None:
        state = "throttled"
    elif turn is not None:
        state = "eligible"
    until = moment(throttled) if state == "throttled" else None
    return _described(partition, client, {tenant: (state, until)})[0]


def quota_in_force(partition: Partition, client: Client, tenant: str | None) -> Quota:
    """Return the quota of a tenant, or with None the one of tenants that have none of their own.

    A tenant's own quota wins over the default that was set live, which wins over the settings'.
    """
    fields = [DEFAULT_QUOTA, CONFIG_QUOTA]
    if tenant is not None:
        fields.insert(0, quota_field(tenant))
    return _first(client.hmget(partition.keys.quotas, fields))


def own_quotas(partition: Partition, client: Client) -> dict[str, Quota]:
    """Return the quotas of all tenants that have one of their own, in chunks from the server."""
    prefix = quota_field("")
    found = {}
    for chunk in scan(client, "hash", partition.keys.quotas):
        for field, packed in chunk:
            name = text(field)
            if name.startswith(prefix):
                found[name[len(prefix) :]] = Quota.unpack(packed)
    return found


def _described(
    partition: Partition, client: Client, found: dict[str, tuple[TenantState, datetime | None]]
) -> list[TenantSnapshot]:
    if not found:
        return []
    keys = partition.keys
    pipeline = client.pipeline(transaction=False)
    for tenant in found:
        pipeline.zcard(keys.tenant(tenant))
    pipeline.hmget(keys.sole, list(found))
    pipeline.hmget(keys.running, list(found))
    pipeline.hmget(keys.quotas, [DEFAULT_QUOTA, CONFIG_QUOTA, *map(quota_field, found)])
    *waiting, soles, running, (default, config, *own) = pipeline.execute()
    return [
        TenantSnapshot(
            tenant=tenant,
            state=state,
            waiting=max(waits, int(sole is not None)),
            running=int(slots or 0),
            until=until,
            quota=_first([packed, default, config]),
        )
        for (tenant, (state, until)), waits, sole, slots, packed in zip(
            found.items(), waiting, soles, running, own, strict=True
        )
    ]


def _first(rows: list[bytes | None]) -> Quota:
    for packed in rows:
        if packed:
            return Quota.unpack(packed)
    return UNLIMITED
