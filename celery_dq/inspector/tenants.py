"""Snapshots of tenants: their backlog, their state, and their quotas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from operator import methodcaller
from typing import Any, Literal, NamedTuple, TypeAlias

from celery_dq.errors import InvalidRequest
from celery_dq.inspector.claim_rates import (
    PACE_FIELDS,
    PartitionPace,
    RunningEntry,
    ServiceRate,
    total_service,
)
from celery_dq.inspector.queue_counters import PLACES, oldest_waiting_of
from celery_dq.inspector.redis_values import (
    CHUNK,
    Client,
    chunks,
    command,
    first_of,
    moment,
    number,
    scan_all,
    text,
)
from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA, PartitionKeys, quota_field
from celery_dq.options import Quota
from celery_dq.options.quota import UNLIMITED, quota_of_bytes
from celery_dq.transport.partition_replies import PauseCause
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import (
    Atomic,
    Commands,
    Rounds,
    run_chosen,
    run_one,
    run_rounds,
    together,
)

TenantState: TypeAlias = Literal["eligible", "resource_set", "throttled", "at_concurrency", "paused", "idle"]


@dataclass(frozen=True)
class TenantSnapshot:
    """The state of a tenant in a queue.

    Attributes:
        tenant: Name of the tenant.
        state: ``eligible`` (served in its turn), ``throttled`` (waits for its rate), ``at_concurrency``
            (waits for its concurrency), ``paused``, ``resource_set`` (its messages wait for any one of its
            resources), or ``idle`` (no message waits).
        waiting: Number of its waiting messages, without delayed ones.
        running: Number of slots that its in-flight messages take.
        until: Its next allowed time, if it is throttled; the end of its pause, if it has one.
        quota: The quota in force for it.
        paused_since: When it was paused by a call; None when it is not paused, or only by its quota.
        paused_until: When that pause ends by itself; None when only a call ends it.
        pause_cause: The task that has paused it by ``Throttled``; None for a pause by a call.
        oldest_waiting_s: How long its oldest waiting message has waited, in seconds; None without one. With
            aging priorities another message may have waited longer, by at most nine steps.
        service: How fast it is served, beside the rate and the share that its quota allows.
    """

    tenant: str
    state: TenantState
    waiting: int
    running: int
    until: datetime | None
    quota: Quota
    paused_since: datetime | None = None
    oldest_waiting_s: float | None = None
    paused_until: datetime | None = None
    pause_cause: PauseCause | None = None
    service: ServiceRate = field(default_factory=ServiceRate)


class InLine(NamedTuple):
    """A tenant with a backlog, in one partition.

    Attributes:
        tenant: Name of the tenant.
        state: Its state; never ``idle``.
        until_us: Its next allowed time, µs; 0 unless throttled.
    """

    tenant: str
    state: TenantState
    until_us: float = 0


_NEVER = datetime.max.replace(tzinfo=timezone.utc)

#: The states of tenants with a backlog, in the order in which lists have them.
BACKLOG_STATES: tuple[TenantState, ...] = (
    "eligible",
    "resource_set",
    "throttled",
    "at_concurrency",
    "paused",
)
#: The states of tenants with a backlog, each with the place of :data:`PLACES` that holds them.
PLACE_OF: dict[TenantState, str] = dict(zip(BACKLOG_STATES, PLACES, strict=True))


def list_tenants(partitions: Sequence[Partition], client: Client, limit: int = 100) -> list[TenantSnapshot]:
    """Read the tenants with a backlog: the eligible ones in order of turn, then the other ones."""
    # A spread tenant comes in each of its partitions.
    repeated = sum(len(now) + len(before) - 1 for now, before in partitions[0].homes.spreads.values())
    chosen = {
        each.tenant: (where, each)
        for where, each in reversed(in_order_of_service(partitions, client, limit + repeated))
    }
    found: list[TenantSnapshot] = []
    for chunk in chunks([*chosen.values()][::-1][:limit]):
        found += totals(partitions, client, chunk)
    return found


def totals(
    partitions: Sequence[Partition], client: Client, chosen: Sequence[tuple[Partition, InLine]]
) -> list[TenantSnapshot]:
    """Read the states of tenants, that of a spread tenant from all of its partitions.

    Args:
        partitions: All partitions of the queue.
        client: A redis client.
        chosen: The tenants, each with one of its partitions.
    """
    homes = partitions[0].homes
    return [
        each
        if each.tenant not in homes.spreads
        else tenant_total(
            [partitions[number] for number in homes.shares_by_partition(each.tenant)], client, each.tenant
        )
        for each in run_chosen(client, chosen, described_tenants)
    ]


def in_order_of_service(
    partitions: Sequence[Partition], client: Client, limit: int
) -> list[tuple[Partition, InLine]]:
    """Return the tenants with a backlog, the eligible ones of all partitions in turns first."""
    lines = run_rounds(client, [_in_line(partition, limit) for partition in partitions])
    ranked = [
        ((BACKLOG_STATES.index(each.state), each.until_us, rank, number), each)
        for number, line in enumerate(lines)
        for rank, each in enumerate(line)
    ]
    ranked.sort(key=lambda entry: entry[0])
    return [(partitions[number], each) for (*_, number), each in ranked[:limit]]


def _in_line(partition: Partition, limit: int) -> Rounds[list[InLine]]:
    found: dict[str, InLine] = {}
    for state, place in PLACE_OF.items():
        members = yield from first_of(getattr(partition.keys, place), limit - len(found))
        for member, score in members:
            tenant = text(member)
            found.setdefault(tenant, InLine(tenant, state, score if state == "throttled" else 0))
    return list(found.values())


def tenant_total(partitions: Sequence[Partition], client: Client, tenant: str) -> TenantSnapshot:
    """Read the state of one tenant in its partitions together: of several states, the first one of the list.

    Args:
        partitions: The partitions in which it lives, and those from which it moves.
        client: A redis client.
        tenant: The tenant.
    """
    return total_of(run_rounds(client, [_snapshot(each, tenant) for each in partitions]))


def total_of(found: Sequence[TenantSnapshot]) -> TenantSnapshot:
    """Return the sum of a tenant's states in its partitions."""
    order: tuple[TenantState, ...] = (*BACKLOG_STATES, "idle")
    if len(found) == 1:
        return found[0]
    first, *others = sorted(found, key=lambda each: (order.index(each.state), each.until or _NEVER))
    return replace(
        first,
        service=total_service([first.service, *(each.service for each in others)], first.quota.rate),
        waiting=sum(each.waiting for each in found),
        running=sum(each.running for each in found),
        oldest_waiting_s=max(
            (each.oldest_waiting_s for each in found if each.oldest_waiting_s is not None), default=None
        ),
    )


def tenant_snapshot(partition: Partition, client: Client, tenant: str) -> TenantSnapshot:
    """Read the state of one tenant in one partition."""
    return run_one(client, _snapshot(partition, tenant))


def _snapshot(partition: Partition, tenant: str) -> Rounds[TenantSnapshot]:
    # Of a tenant that is in two places, the first state counts.
    states: list[TenantState] = ["paused", "at_concurrency", "throttled", "eligible", "resource_set"]
    keys = [getattr(partition.keys, PLACE_OF[state]) for state in states]
    scores = yield Atomic(together(*(methodcaller("zscore", key, tenant) for key in keys)))
    found = {state: score for state, score in zip(states, scores, strict=True) if score is not None}
    state: TenantState = next(iter(found), "idle")
    until_us = found["throttled"] if state == "throttled" else 0
    (described,) = yield from described_tenants(partition, [InLine(tenant, state, until_us)])
    return described


def quota_in_force(partition: Partition, client: Client, tenant: str | None) -> Quota:
    """Return the quota in force for a tenant, or with None for tenants without their own quota.

    A tenant's own quota has precedence over the default that was set live, and that over the quota of the
    settings. A tenant that was paused by a call is paused, whatever its quota says.
    """
    quota = stored_quota(partition, client, tenant)
    if tenant is None:
        return quota
    pipeline = client.pipeline(transaction=False)
    _put_pauses(pipeline, keys=partition.keys, names=[tenant])
    ((since, *_),) = _pauses_in_force(*pipeline.execute())
    return _in_force(quota, since)


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


def settings_quota(partition: Partition) -> Rounds[SettingsQuota | None]:
    """Return the quota that workers have stored from their settings; None when there is none."""
    packed_and_info = yield Atomic(_quotas(partition.keys, [CONFIG_QUOTA]))
    (packed,), (info,) = packed_and_info
    quota = quota_of_bytes(packed)
    return None if quota is None else SettingsQuota(quota, *_author_and_time(info))


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


def quota_origins(partition: Partition, tenants: Sequence[str | None]) -> Rounds[list[QuotaOrigin]]:
    """Return the origin of the quota of each tenant; None is a tenant without its own quota."""
    keys = partition.keys
    origins = []
    for chunk in chunks(tenants):
        fields = [DEFAULT_QUOTA, CONFIG_QUOTA]
        fields += [DEFAULT_QUOTA if tenant is None else quota_field(tenant) for tenant in chunk]
        quotas, infos = yield Atomic(_quotas(keys, fields))
        (default, config, *own), (default_info, config_info, *own_info) = quotas, infos
        for tenant, packed, info in zip(chunk, own, own_info, strict=True):
            if packed and tenant is not None:
                origins.append(QuotaOrigin("tenant", *_author_and_time(info)))
            elif default:
                origins.append(QuotaOrigin("default", *_author_and_time(default_info)))
            elif config:
                origins.append(QuotaOrigin("settings", *_author_and_time(config_info)))
            else:
                origins.append(QuotaOrigin("none"))
    return origins


def _quotas(keys: PartitionKeys, fields: list[str]) -> Commands:
    return together(*(methodcaller("hmget", key, fields) for key in (keys.quotas, keys.quota_info)))


def _author_and_time(info: bytes | None) -> tuple[str, datetime | None]:
    """Return the parts of an entry of the hash ``quota_info``."""
    at_us, _, by = text(info or "").partition(" ")
    return by, moment(number(at_us))


def own_quotas(partitions: Sequence[Partition], client: Client) -> dict[str, Quota]:
    """Return the own quotas of tenants. Read in chunks."""
    prefix, homes = quota_field(""), partitions[0].homes
    found = {}
    stored = run_rounds(client, [scan_all("hash", each.keys.quotas) for each in partitions])
    for partition, quotas in zip(partitions, stored, strict=True):
        for member, packed in quotas.items():
            tenant, quota = text(member).removeprefix(prefix), quota_of_bytes(packed)
            is_own = tenant != text(member) and homes.concerns(partition.keys.partition, tenant)
            if is_own and quota is not None:
                found[tenant] = quota
    return found


def described_tenants(partition: Partition, found: Sequence[InLine]) -> Rounds[list[TenantSnapshot]]:
    """Read the states of tenants of one partition, in their order."""
    keys = partition.keys
    names = [each.tenant for each in found]

    def read(pipe: Any) -> None:
        for tenant in names:
            pipe.zcard(keys.tenant(tenant))
        pipe.hmget(keys.single, names)
        pipe.hmget(keys.running, names)
        pipe.hmget(keys.quotas, [DEFAULT_QUOTA, CONFIG_QUOTA, *map(quota_field, names)])
        pipe.hmget(keys.state, PACE_FIELDS)
        _put_pauses(pipe, keys=keys, names=names)

    *waiting, singles, running, (default, config, *own), state, pauses, ends, causes, now = yield read
    pace, entries = PartitionPace.read(state, now), [RunningEntry.unpack(each) for each in running]
    oldest = yield from oldest_waiting_of(partition, names)
    in_force = _pauses_in_force(pauses, ends, causes, now)
    quotas = [
        _in_force(_first([packed, default, config]), since)
        for packed, (since, *_) in zip(own, in_force, strict=True)
    ]
    # No claim has placed it again since its pause ended.
    states: list[TenantState] = [
        "eligible" if each.state == "paused" and not quota.paused else each.state
        for each, quota in zip(found, quotas, strict=True)
    ]
    return [
        TenantSnapshot(
            tenant=each.tenant,
            state=standing,
            waiting=max(waits, int(single is not None)),
            running=entry.slots,
            until=moment(each.until_us or end),
            quota=quota,
            paused_since=moment(since),
            oldest_waiting_s=age,
            paused_until=moment(end),
            pause_cause=PauseCause.unpack(cause),
            service=pace.service(entry, standing, quota),
        )
        for each, standing, waits, single, entry, quota, (since, end, cause), age in zip(
            found, states, waiting, singles, entries, quotas, in_force, oldest, strict=True
        )
    ]


def _put_pauses(pipe: Any, *, keys: PartitionKeys, names: Sequence[str]) -> None:
    pipe.zmscore(keys.pauses, names)
    pipe.zmscore(keys.pause_ends, names)
    pipe.hmget(keys.pause_causes, names)
    pipe.time()


def _pauses_in_force(
    pauses: Sequence[float | None],
    ends: Sequence[float | None],
    causes: Sequence[bytes | None],
    now: tuple[int, int],
) -> list[tuple[float, float, bytes | None]]:
    """Return begin and end in µs (0 for none) and cause of each pause; one that is over counts as none."""
    now_us = now[0] * 1_000_000 + now[1]
    found = [
        (since or 0.0, end or 0.0, cause) for since, end, cause in zip(pauses, ends, causes, strict=True)
    ]
    return [(0.0, 0.0, None) if 0 < pause[1] <= now_us else pause for pause in found]


def _in_force(quota: Quota, paused_since: float) -> Quota:
    return replace(quota, paused=True) if paused_since else quota


def _first(rows: list[bytes | None]) -> Quota:
    return next(filter(None, map(quota_of_bytes, rows)), UNLIMITED)


#: Tenants that one call of :func:`tenant_page` may look at.
MOST_LOOKS = 10_000


@dataclass(frozen=True)
class TenantPage:
    """A part of the tenants with a backlog.

    Attributes:
        tenants: Their states: the eligible ones first, partition by partition, in order of service.
        after: The cursor of the next part; "" when there is none.
        looked_at: Number of tenants whose names were compared.
    """

    tenants: tuple[TenantSnapshot, ...]
    after: str
    looked_at: int


def tenant_page(
    partitions: Sequence[Partition],
    client: Client,
    *,
    after: str = "",
    text_in_name: str = "",
    state: TenantState | None = None,
    limit: int = 50,
) -> TenantPage:
    """Read a part of the tenants with a backlog, at a cost that does not depend on their number.

    A search ends after :data:`MOST_LOOKS` names, and the next part continues it. A tenant that changes its
    place between two parts may come twice, or be missed.

    Args:
        partitions: All partitions of the queue.
        client: The client.
        after: The cursor of the part before; "" begins.
        text_in_name: Only tenants whose name contains it, in any case of its letters.
        state: Only tenants in this state.
        limit: Number of tenants, at most.

    Raises:
        InvalidRequest: `after` is not a cursor, or `state` is not the state of a backlog.
    """
    if state is not None and state not in PLACE_OF:
        raise InvalidRequest(f"state = {state!r}: give one of {', '.join(PLACE_OF)}")
    lines = [
        _Line(each, number)
        for each in ([state] if state is not None else BACKLOG_STATES)
        for number in range(len(partitions))
    ]
    wanted = text_in_name.casefold()
    found: dict[str, tuple[Partition, InLine]] = {}
    looked_at, cursor = 0, ""
    # One tenant more than the page has shows that another part follows.
    step = CHUNK if wanted else limit + 1
    for line, rank, tenant, score in _ranked(partitions, client, lines, after, step):
        matches = wanted in tenant.casefold()
        if looked_at == MOST_LOOKS or (matches and len(found) == limit):
            cursor = f"{line.state}.{line.number}.{rank}"
            break
        looked_at += 1
        if matches:
            until_us = score if line.state == "throttled" else 0
            found[tenant] = (partitions[line.number], InLine(tenant, line.state, until_us))
    return TenantPage(tuple(totals(partitions, client, list(found.values()))), cursor, looked_at)


@dataclass(frozen=True)
class _Line:
    """The tenants in one state of one partition."""

    state: TenantState
    number: int

    def key(self, partitions: Sequence[Partition]) -> str:
        """Return the sorted set of the tenants."""
        key: str = getattr(partitions[self.number].keys, PLACE_OF[self.state])
        return key


def _ranked(
    partitions: Sequence[Partition], client: Client, lines: Sequence[_Line], after: str, step: int
) -> Iterator[tuple[_Line, int, str, float]]:
    """Yield line, rank, name and score of the tenants from a cursor on, read in chunks of `step`."""
    first, rank = _begin(lines, after)
    keys = [line.key(partitions) for line in lines]
    sizes = run_rounds(client, [command("zcard", key) for key in keys])
    # One pipeline reads several short lines, or a chunk of a long one.
    chosen: list[tuple[int, int, int]] = []
    for place in range(first, len(lines)):
        while rank < sizes[place]:
            end = min(rank + step - sum(last - start for _, start, last in chosen), sizes[place])
            chosen.append((place, rank, end))
            rank = end
            if sum(last - start for _, start, last in chosen) == step:
                yield from _read(client, lines, keys, chosen)
                chosen = []
        rank = 0
    yield from _read(client, lines, keys, chosen)


def _read(
    client: Client, lines: Sequence[_Line], keys: Sequence[str], chosen: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[_Line, int, str, float]]:
    ranges = [command("zrange", keys[place], start, end - 1, withscores=True) for place, start, end in chosen]
    for (place, start, _), rows in zip(chosen, run_rounds(client, ranges), strict=True):
        for rank, (member, score) in enumerate(rows, start):
            yield lines[place], rank, text(member), score


def _begin(lines: Sequence[_Line], after: str) -> tuple[int, int]:
    """Return the place of the line and the rank in it that a cursor names."""
    if not after:
        return 0, 0
    state, *numbers = after.split(".")
    if len(numbers) == 2 and all(each.isascii() and each.isdecimal() and len(each) < 10 for each in numbers):
        number, rank = map(int, numbers)
        for place, line in enumerate(lines):
            if (line.state, line.number) == (state, number):
                return place, rank
    raise InvalidRequest(f"after = {after!r} is not a cursor of this list: begin without it")
