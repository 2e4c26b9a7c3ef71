"""Quotas, pauses and tombstones, which follow their tenants to other partitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import Any

from celery_dq.app.api.broker import MapChanged
from celery_dq.inspector.queues import PAUSE_FIELDS
from celery_dq.inspector.redis_values import Client, chunks, command, scan_all, text
from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA, quota_field
from celery_dq.options.quota import quota_of_bytes
from celery_dq.scripts.loader import Argument
from celery_dq.transport.redis.store.move_calls import MOVE_CHUNK, store_tenant_settings
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.quotas import REPLACED_MS, place_held_back
from celery_dq.transport.redis.store.rounds import Rounds, run_one, run_rounds
from celery_dq.transport.redis.store.script_calls import run_all

#: Looks at the settings of all partitions. The last one finds a difference only if users still change some.
MOST_LOOKS = 10

_OF_ALL = (DEFAULT_QUOTA, CONFIG_QUOTA)


@dataclass
class StoredSettings:
    """Quotas, pauses and tombstones of a partition, or those of them that are to be written.

    Attributes:
        quotas: Field of the hash ``quotas`` -> packed quota.
        infos: The same fields -> time and author.
        pauses: Paused tenant -> begin of the pause, µs.
        pause_ends: Paused tenant -> end of the pause, µs, if it ends by itself.
        pause_causes: Paused tenant -> cause of the pause, as stored, if a task has paused it.
        queue_pause: Fields of the state that hold the pause of the whole queue.
        tombstones: Task id -> expiry, µs.
        config_before: Quota of settings -> when another one has replaced it, µs.
        fields: Fields of the hash ``quotas`` to write, with the pauses of their tenants. One without a value
            here is removed.
    """

    quotas: dict[bytes, bytes] = field(default_factory=dict)
    infos: dict[bytes, bytes] = field(default_factory=dict)
    pauses: dict[bytes, float] = field(default_factory=dict)
    pause_ends: dict[bytes, float] = field(default_factory=dict)
    pause_causes: dict[bytes, bytes] = field(default_factory=dict)
    queue_pause: dict[str, bytes] = field(default_factory=dict)
    tombstones: dict[bytes, float] = field(default_factory=dict)
    config_before: dict[bytes, float] = field(default_factory=dict)
    fields: set[str] = field(default_factory=set)

    def tenants(self) -> set[str]:
        """Return the tenants with a quota of their own or a pause."""
        return _tenants_of(map(text, self.quotas)) | set(map(text, self.pauses))

    def of_tenant(self, tenant: str) -> StoredSettings:
        """Return the quota and the pause of one tenant."""
        found = StoredSettings()
        found.add(self, [tenant])
        return found

    def of_all(self) -> tuple[dict[str, bytes], list[bytes | None]]:
        """Return the pause of the queue and the quotas that all partitions have."""
        return self.queue_pause, [self.quotas.get(name.encode()) for name in _OF_ALL]

    def add(self, other: StoredSettings, tenants: Iterable[str], fields: Iterable[str] = ()) -> None:
        """Add the quotas and pauses that another partition stores for these tenants, and these fields."""
        members = [*map(_encoded, tenants)]
        names = [_encoded(quota_field("")) + each for each in members] + [*map(_encoded, fields)]
        self.quotas |= {name: other.quotas[name] for name in names if name in other.quotas}
        self.infos |= {name: other.infos[name] for name in names if name in other.infos}
        self.pauses |= {name: other.pauses[name] for name in members if name in other.pauses}
        self.pause_ends |= {name: other.pause_ends[name] for name in members if name in other.pause_ends}
        self.pause_causes |= {
            name: other.pause_causes[name] for name in members if name in other.pause_causes
        }

    def holds_as(self, other: StoredSettings) -> bool:
        """Return whether the quotas and pauses are those of another partition; their times may differ."""
        return (self.quotas, self.pauses.keys(), self.pause_ends) == (
            other.quotas,
            other.pauses.keys(),
            other.pause_ends,
        )

    def entry(self, name: bytes) -> tuple[Argument, ...]:
        """Return a field with its values, as the script that writes it takes them."""
        tenant = name.removeprefix(_encoded(quota_field("")))
        quota, info = self.quotas.get(name, b""), self.infos.get(name, b"")
        pause = (each.get(tenant, b"") for each in (self.pauses, self.pause_ends, self.pause_causes))
        return name, quota, info, *pause

    def divide(self, tenant: str, homes: PartitionMap, number: int) -> None:
        """Replace the quota of a spread tenant by that of its share in the partition of this number."""
        name = _encoded(quota_field(tenant))
        stored = quota_of_bytes(self.quotas.get(name))
        if tenant in homes.spreads and stored is not None:
            quota = replace(stored, spread=len(homes.partitions(tenant)))
            self.quotas[name] = quota.pack(homes.shares_by_partition(tenant)[number], homes.widest(tenant))


def copy_settings(partitions: Sequence[Partition], client: Client) -> None:
    """Copy quotas and pauses to the future homes of their tenants, and to new partitions what all have.

    Args:
        partitions: All partitions, with the map of the change, which is not decided yet.
        client: A redis client.

    Raises:
        MapChanged: Another change has begun.
    """
    homes = partitions[0].homes
    stored = run_rounds(client, [_read(each) for each in partitions])
    writes = [StoredSettings(tombstones=_all_tombstones(stored)) for _ in partitions]
    for number, each in enumerate(stored):
        for tenant in each.tenants():
            old_homes = homes.old_partitions(tenant)
            if number not in old_homes:
                writes[number].fields.add(quota_field(tenant))  # an interrupted change has left it
            elif number == old_homes[0]:
                for home in set(homes.partitions(tenant)).difference(old_homes):
                    writes[home].fields.add(quota_field(tenant))
                    writes[home].add(each, [tenant])
                    writes[home].divide(tenant, homes, home)
    _write_of_all(homes, stored, writes)
    _write_all([*zip(partitions, writes, strict=True)], client)


def align_settings(partitions: Sequence[Partition], client: Client) -> None:
    """Give all partitions of the tenants that move the quotas and pauses of their first former homes.

    A user may have changed some after :func:`copy_settings`, by the map before, and a process that was
    killed may have changed some of them. Users who know the new map set both homes, the former one first.
    So a look that finds no difference is the last one.

    Args:
        partitions: All partitions, with the map of the change, which all of them have stored.
        client: A redis client.

    Raises:
        MapChanged: Another process has ended the change.
    """
    homes = partitions[0].homes
    for look in range(MOST_LOOKS):
        stored = run_rounds(client, [_read(each) for each in partitions])
        writes = [StoredSettings() for _ in partitions]
        for number, each in enumerate(stored):
            for tenant in filter(homes.moves, each.tenants()):
                first = homes.old_partitions(tenant)[0]
                if number == first:
                    _align(tenant, homes, stored, writes)
                elif tenant not in stored[first].tenants():
                    writes[number].fields.add(quota_field(tenant))
        _write_of_all(homes, stored, writes)
        if look == 0:
            every = _all_tombstones(stored).items()
            for own, write in zip(stored, writes, strict=True):
                write.tombstones = {name: end for name, end in every if name not in own.tombstones}
        changed = [pair for pair in zip(partitions, writes, strict=True) if pair[1] != StoredSettings()]
        if not changed:
            return
        _write_all(changed, client)
        place_held_back([partition for partition, _ in changed], client)


def _align(
    tenant: str, homes: PartitionMap, stored: Sequence[StoredSettings], writes: Sequence[StoredSettings]
) -> None:
    for number in homes.shares_by_partition(tenant):
        wanted = stored[homes.old_partitions(tenant)[0]].of_tenant(tenant)
        wanted.divide(tenant, homes, number)
        if not wanted.holds_as(stored[number].of_tenant(tenant)):
            writes[number].fields.add(quota_field(tenant))
            writes[number].add(wanted, [tenant])


def _all_tombstones(stored: Sequence[StoredSettings]) -> dict[bytes, float]:
    # The tenant of a task that comes later is not known.
    return {name: end for each in stored for name, end in each.tombstones.items()}


def _write_of_all(
    homes: PartitionMap, stored: Sequence[StoredSettings], writes: Sequence[StoredSettings]
) -> None:
    for number in range(homes.before or 0, homes.count):
        if stored[number].of_all() != stored[0].of_all():
            writes[number].fields.update(_OF_ALL)
            writes[number].add(stored[0], (), _OF_ALL)
            writes[number].queue_pause = stored[0].queue_pause
        replaced = stored[0].config_before.items() - stored[number].config_before.items()
        writes[number].config_before = dict(replaced)


def remove_former_settings(partitions: Sequence[Partition], client: Client) -> None:
    """Remove the quotas and pauses of tenants that live elsewhere.

    Args:
        partitions: All partitions, with the map that ends the change.
        client: A redis client.
    """
    homes = partitions[0].homes
    stored = run_rounds(client, [_read(each) for each in partitions])
    writes = [
        StoredSettings(
            fields={quota_field(each) for each in own.tenants() if number not in homes.partitions(each)}
        )
        for number, own in enumerate(stored)
    ]
    # Where the next change has begun, that one removes them.
    run_rounds(client, [_write(*each) for each in zip(partitions, writes, strict=True)])


def divide_quotas(partitions: Sequence[Partition], tenants: Iterable[str], client: Client) -> None:
    """Give each share of these tenants its final part of the quota, when no other partition serves it.

    A quota that a user sets meanwhile stays. By the map of the change, it is divided among the shares of the
    higher spread, and by the map that ends the change, it has its final parts.

    Args:
        partitions: All partitions, with the map that they have stored.
        tenants: The tenants that are spread, or were before the change.
        client: A redis client.
    """
    homes = partitions[0].homes
    for tenant in tenants:
        shares = homes.partitions(tenant)
        reads = [command("hget", partitions[number].keys.quotas, quota_field(tenant)) for number in shares]
        calls = []
        for share, (number, packed) in enumerate(zip(shares, run_rounds(client, reads), strict=True)):
            quota = quota_of_bytes(packed)
            divided = None if quota is None else quota.pack(share, len(shares))
            if divided is not None and divided != packed:
                calls.append(partitions[number].divide_quota(tenant, packed, divided))
        run_all(calls, client)


def divide_used_permits(partitions: Sequence[Partition], client: Client) -> None:
    """Charge the permits that a share has used before it goes to those that stay.

    The time after which all permits of a share are back is the same one for the whole quota. So the mean of
    these times is that of the quota. It delays a share, and never hastens one. A second call, after a crash,
    charges the same permits again.

    Args:
        partitions: All partitions, with the map of the change. No share that goes is served any more.
        client: A redis client.
    """
    homes = partitions[0].homes
    for tenant, (now, before) in homes.spreads.items():
        if len(now) >= len(before):
            continue
        (at_us, *arrivals) = run_one(client, _read_arrivals([partitions[each] for each in before], tenant))
        used_us = sum(max(each - at_us, 0) for each in arrivals) // len(before)
        for number in now if used_us else ():
            client.zadd(partitions[number].keys.limiter, {tenant: at_us + used_us}, gt=True)


def _read_arrivals(partitions: Sequence[Partition], tenant: str) -> Rounds[list[int]]:
    """Return the time of the server and the theoretical arrival times of the shares, in µs."""

    def read(pipe: Any) -> None:
        pipe.time()
        for each in partitions:
            pipe.zscore(each.keys.limiter, tenant)

    (seconds, micros), *arrivals = yield read
    return [seconds * 1_000_000 + micros, *(int(each or 0) for each in arrivals)]


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _tenants_of(fields: Iterable[str]) -> set[str]:
    prefix = quota_field("")
    return {name[len(prefix) :] for name in fields if name.startswith(prefix)}


def _read(partition: Partition) -> Rounds[StoredSettings]:
    keys = partition.keys
    quotas = yield from scan_all("hash", keys.quotas)
    infos = yield from scan_all("hash", keys.quota_info)
    pauses = yield from scan_all("zset", keys.pauses)
    ends = yield from scan_all("zset", keys.pause_ends)
    causes = yield from scan_all("hash", keys.pause_causes)
    tombstones = yield from scan_all("zset", keys.tombstones)
    replaced = yield from scan_all("zset", keys.config_before)
    (fields,) = yield lambda pipe: pipe.hmget(keys.state, PAUSE_FIELDS)
    queue_pause = {name: each or b"0" for name, each in zip(PAUSE_FIELDS, fields, strict=True)}
    return StoredSettings(quotas, infos, pauses, ends, causes, queue_pause, tombstones, replaced)


def _write_all(changes: Sequence[tuple[Partition, StoredSettings]], client: Client) -> None:
    if not all(run_rounds(client, [_write(*each) for each in changes])):
        raise MapChanged.of(changes[0][0].keys.queue)


def _write(partition: Partition, stored: StoredSettings) -> Rounds[bool]:
    """Store settings; return False when the partition belongs to another change, and keeps its own.

    No tombstone does harm, and no quota that was replaced, so those are stored in any case.
    """
    keys = partition.keys
    for key, scores in ((keys.tombstones, stored.tombstones), (keys.config_before, stored.config_before)):
        for some in chunks([*scores.items()]):
            yield methodcaller("zadd", key, dict(some))
    if stored.config_before:
        yield methodcaller("pexpire", keys.config_before, REPLACED_MS)
    queue_pause = [stored.queue_pause.get(name, b"") for name in PAUSE_FIELDS]
    entries = [stored.entry(_encoded(each)) for each in stored.fields]
    for start in range(0, len(entries), MOVE_CHUNK):
        some_entries = entries[start : start + MOVE_CHUNK]
        if not (yield store_tenant_settings(partition, queue_pause, some_entries)):
            return False
    return True
