"""Snapshots of tenants: their backlog, their state, and their quotas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Literal, TypeAlias

from celery_dq.inspector.queue_counters import oldest_waiting_of
from celery_dq.inspector.redis_values import Client, chunks, first_of, moment, scan, text
from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA, quota_field
from celery_dq.options import Quota
from celery_dq.options.quota import UNLIMITED
from celery_dq.transport.redis.store.full_server import read_together
from celery_dq.transport.redis.store.partition import Partition

TenantState: TypeAlias = Literal["eligible", "throttled", "at_concurrency", "paused", "idle"]


@dataclass(frozen=True)
class TenantSnapshot:
    """The state of a tenant in a queue.

    Attributes:
        tenant: Name of the tenant.
        state: ``eligible`` (served in its turn), ``throttled`` (waits for its rate), ``limited`` (waits for
            its concurrency), ``paused``, or ``idle`` (no message waits).
        waiting: Number of its waiting messages, without delayed ones.
        running: Number of slots that its in-flight messages take.
        until: Its next allowed time; None unless throttled.
        quota: The quota in force for it.
        paused_since: When it was paused by a call; None when it is not paused, or only by its quota.
        oldest_waiting_s: How long its oldest waiting message has waited, in seconds; None without one. With
            aging priorities another message may have waited longer, by at most nine steps.
    """

    tenant: str
    state: TenantState
    waiting: int
    running: int
    until: datetime | None
    quota: Quota
    paused_since: datetime | None = None
    oldest_waiting_s: float | None = None


def list_tenants(partition: Partition, client: Client, limit: int = 100) -> list[TenantSnapshot]:
    """Read the tenants with a backlog: the eligible ones in order of turn, then the other ones."""
    keys = partition.keys
    found: dict[str, tuple[TenantState, datetime | None]] = {}
    states: tuple[tuple[TenantState, str], ...] = (
        ("eligible", keys.turn),
        ("throttled", keys.throttled),
        ("at_concurrency", keys.at_concurrency),
        ("paused", keys.paused),
    )
    for state, key in states:
        left = limit - len(found)
        if left <= 0:
            break
        for member, score in first_of(client, key, left):
            found.setdefault(text(member), (state, moment(score) if state == "throttled" else None))
    return [
        each for chunk in chunks(list(found.items())) for each in _described(partition, client, dict(chunk))
    ]


def tenant_snapshot(partition: Partition, client: Client, tenant: str) -> TenantSnapshot:
    """Read the state of one tenant."""
    keys = partition.keys
    places = (keys.turn, keys.throttled, keys.at_concurrency, keys.paused)
    reads = [("ZSCORE", key, tenant) for key in places]
    turn, throttled, limited, paused = read_together(client, reads)
    state: TenantState = "idle"
    if paused is not None:
        state = "paused"
    elif limited is not None:
        state = "at_concurrency"
    elif throttled is not None:
        state = "throttled"
    elif turn is not None:
        state = "eligible"
    until = moment(throttled) if state == "throttled" else None
    return _described(partition, client, {tenant: (state, until)})[0]


def quota_in_force(partition: Partition, client: Client, tenant: str | None) -> Quota:
    """Return the quota in force for a tenant, or with None for tenants without their own quota.

    A tenant's own quota has precedence over the default that was set live, and that over the quota of the
    settings. A tenant that was paused by a call is paused, whatever its quota says.
    """
    quota = stored_quota(partition, client, tenant)
    return quota if tenant is None else _in_force(quota, client.zscore(partition.keys.pauses, tenant))


def stored_quota(partition: Partition, client: Client, tenant: str | None) -> Quota:
    """Return the quota of a tenant as :func:`quota_in_force`, but without regard to a pause by a call."""
    fields = [DEFAULT_QUOTA, CONFIG_QUOTA]
    if tenant is not None:
        fields.insert(0, quota_field(tenant))
    return _first(client.hmget(partition.keys.quotas, fields))


@dataclass(frozen=True)
class SettingsQuota:
    """The quota that a worker has stored from its settings.

    Attributes:
        quota: The quota, for tenants without their own quota, unless a default was set live.
        by: Worker that stored it.
        at: When it was stored.
    """

    quota: Quota
    by: str
    at: datetime | None


def settings_quota(partition: Partition, client: Client) -> SettingsQuota | None:
    """Return the quota that workers have stored from their settings; None when there is none."""
    keys = partition.keys
    pipeline = client.pipeline(transaction=True)
    pipeline.hget(keys.quotas, CONFIG_QUOTA)
    pipeline.hget(keys.quota_info, CONFIG_QUOTA)
    packed, info = pipeline.execute()
    return SettingsQuota(Quota.unpack(packed), *_author_and_time(info)) if packed else None


@dataclass(frozen=True)
class QuotaOrigin:
    """Where a quota in force comes from.

    Attributes:
        source: ``tenant`` (set live for the tenant), ``default`` (set live for all tenants), ``settings``
            (stored by a worker), or ``none`` (there is no quota).
        by: User or worker that set it; "" when that is not known.
        at: When it was set.
    """

    source: Literal["tenant", "default", "settings", "none"]
    by: str = ""
    at: datetime | None = None

    def __str__(self) -> str:
        """Return a phrase that explains a quota."""
        if self.source == "none":
            return "no quota is set"
        what = "from the settings, stored" if self.source == "settings" else "set live"
        by = f" by {self.by}" if self.by else ""
        return what + by + (f" at {self.at.isoformat(timespec='seconds')}" if self.at else "")


def quota_origins(partition: Partition, client: Client, tenants: Iterable[str | None]) -> list[QuotaOrigin]:
    """Return the origin of the quota of each tenant; None is a tenant without its own quota."""
    found = []
    for chunk in chunks(list(tenants)):
        fields = [DEFAULT_QUOTA, CONFIG_QUOTA]
        fields += [DEFAULT_QUOTA if tenant is None else quota_field(tenant) for tenant in chunk]
        pipeline = client.pipeline(transaction=True)
        pipeline.hmget(partition.keys.quotas, fields)
        pipeline.hmget(partition.keys.quota_info, fields)
        (default, config, *own), (default_info, config_info, *own_info) = pipeline.execute()
        for tenant, packed, info in zip(chunk, own, own_info, strict=True):
            if packed and tenant is not None:
                found.append(QuotaOrigin("tenant", *_author_and_time(info)))
            elif default:
                found.append(QuotaOrigin("default", *_author_and_time(default_info)))
            elif config:
                found.append(QuotaOrigin("settings", *_author_and_time(config_info)))
            else:
                found.append(QuotaOrigin("none"))
    return found


def _author_and_time(info: bytes | None) -> tuple[str, datetime | None]:
    """Return the parts of an entry of the hash ``quota_info``."""
    at_us, _, by = text(info or "").partition(" ")
    return by, moment(float(at_us or 0))


def paused_tenants(partition: Partition, client: Client) -> dict[str, datetime]:
    """Return the tenants that were paused by a call, with the times. Read in chunks."""
    found = {
        text(tenant): since
        for chunk in scan(client, "zset", partition.keys.pauses)
        for tenant, since in chunk
    }
    ordered = sorted(found, key=lambda tenant: (found[tenant], tenant))
    return {tenant: datetime.fromtimestamp(found[tenant] / 1e6, timezone.utc) for tenant in ordered}


def own_quotas(partition: Partition, client: Client) -> dict[str, Quota]:
    """Return the own quotas of tenants. Read in chunks."""
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
    keys = partition.keys
    pipeline = client.pipeline(transaction=False)
    for tenant in found:
        pipeline.zcard(keys.tenant(tenant))
    pipeline.hmget(keys.single, list(found))
    pipeline.hmget(keys.running, list(found))
    pipeline.hmget(keys.quotas, [DEFAULT_QUOTA, CONFIG_QUOTA, *map(quota_field, found)])
    pipeline.zmscore(keys.pauses, list(found))
    *waiting, singles, running, (default, config, *own), pauses = pipeline.execute()
    oldest = oldest_waiting_of(partition, client, list(found))
    return [
        TenantSnapshot(
            tenant=tenant,
            state=state,
            waiting=max(waits, int(single is not None)),
            running=int(slots or 0),
            until=until,
            quota=_in_force(_first([packed, default, config]), since),
            paused_since=moment(since or 0),
            oldest_waiting_s=age,
        )
        for (tenant, (state, until)), waits, single, slots, packed, since, age in zip(
            found.items(), waiting, singles, running, own, pauses, oldest, strict=True
        )
    ]


def _in_force(quota: Quota, paused_since: float | None) -> Quota:
    return quota if paused_since is None else replace(quota, paused=True)


def _first(rows: list[bytes | None]) -> Quota:
    for packed in rows:
        if packed:
            return Quota.unpack(packed)
    return UNLIMITED
