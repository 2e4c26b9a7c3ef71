"""Quotas, pauses and tombstones, which follow their tenants to other partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from celery_dq.inspector.pauses import PAUSE_FIELDS
from celery_dq.inspector.redis_values import CHUNK, Client, scan_all, text
from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA, quota_field
from celery_dq.options import Quota
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds
from celery_dq.transport.redis.store.script_batches import run_all

__all__ = ["StoredSettings", "copy_settings", "divide_quotas", "remove_former_settings"]

_OF_ALL = (DEFAULT_QUOTA, CONFIG_QUOTA)


@dataclass
class StoredSettings:
    """Quotas, pauses and tombstones of a partition, or those of them that are to be written.

    Attributes:
        quotas: Field of the hash ``quotas`` -> packed quota.
        infos: The same fields -> time and author.
        pauses: Paused tenant -> begin of the pause, µs.
        pause_ends: Paused tenant -> end of the pause, µs, if it ends by itself.
        queue_pause: Fields of the state that hold the pause of the whole queue.
        tombstones: Task id -> expiry, µs.
        gone: Fields of the hash ``quotas`` to remove first, with the pauses of their tenants.
    """

    quotas: dict[bytes, bytes] = field(default_factory=dict)
    infos: dict[bytes, bytes] = field(default_factory=dict)
    pauses: dict[bytes, float] = field(default_factory=dict)
    pause_ends: dict[bytes, float] = field(default_factory=dict)
    queue_pause: dict[str, bytes] = field(default_factory=dict)
    tombstones: dict[bytes, float] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def tenants(self) -> set[str]:
        """Return the tenants with a quota of their own or a pause."""
        return _tenants_of(map(text, self.quotas)) | set(map(text, self.pauses))

    def changed_tenants(self, former: StoredSettings) -> set[str]:
        """Return the tenants whose quota or pause is not that of a former look."""
        quotas = {name for name, _ in self.quotas.items() ^ former.quotas.items()}
        pauses = {
            name
            for name, _ in (self.pauses.items() ^ former.pauses.items())
            | (self.pause_ends.items() ^ former.pause_ends.items())
        }
        return _tenants_of(map(text, quotas)) | set(map(text, pauses))

    def of_all(self) -> tuple[dict[str, bytes], list[bytes | None]]:
        """Return the pause of the queue and the quotas that all partitions have."""
        return self.queue_pause, [self.quotas.get(name.encode()) for name in _OF_ALL]

    def add(self, other: StoredSettings, tenants: set[str], fields: Sequence[str] = ()) -> None:
        """Add the quotas and pauses that another partition stores for these tenants, and these fields."""
        names = {quota_field(tenant) for tenant in tenants}.union(fields)
        self.quotas |= {name: each for name, each in other.quotas.items() if text(name) in names}
        self.infos |= {name: each for name, each in other.infos.items() if text(name) in names}
        self.pauses |= {name: each for name, each in other.pauses.items() if text(name) in tenants}
        self.pause_ends |= {name: each for name, each in other.pause_ends.items() if text(name) in tenants}

    def divide(self, tenant: str, homes: PartitionMap, number: int) -> None:
        """Replace the quota of a spread tenant by that of its share in the partition of this number."""
        name = quota_field(tenant).encode("utf-8", "surrogateescape")
        if tenant in homes.spreads and name in self.quotas:
            quota = Quota.unpack(self.quotas[name])
            self.quotas[name] = quota.pack(homes.numbers(tenant)[number], homes.widest(tenant))


# A future home serves none of these tenants yet, so plain writes are enough: none has to be placed again.


def copy_settings(
    partitions: Sequence[Partition], client: Client, former: Sequence[StoredSettings] | None = None
) -> list[StoredSettings]:
    """Copy quotas and pauses to the future homes of their tenants, and to new partitions what all have.

    Args:
        partitions: All partitions, with the map of the change.
        client: A redis client.
        former: The result of a former call: copy only what has changed in the former homes since.

    Returns:
        What the partitions stored before this call.
    """
    homes = partitions[0].homes
    stored = run_rounds(client, [_read(each) for each in partitions])
    seen = former or [StoredSettings() for _ in partitions]
    writes = [StoredSettings() for _ in partitions]
    known = {name for each in seen for name in each.tombstones}
    tombstones = {name: end for each in stored for name, end in each.tombstones.items() if name not in known}
    for number, each in enumerate(stored):
        writes[number].tombstones = tombstones  # the tenant of a task that comes later is not known
        for tenant in each.changed_tenants(seen[number]):
            old_shares = homes.old_shares(tenant)
            if number not in old_shares:
                if not former:
                    writes[number].gone.add(quota_field(tenant))  # an interrupted change has left it
            elif number == old_shares[0]:
                for home in set(homes.shares(tenant)).difference(old_shares):
                    writes[home].gone.add(quota_field(tenant))
                    writes[home].add(each, {tenant})
                    writes[home].divide(tenant, homes, home)
    if stored[0].of_all() != seen[0].of_all():
        for number in range(homes.before or 0, homes.count):
            writes[number].gone.update(_OF_ALL)
            writes[number].add(stored[0], set(), _OF_ALL)
            writes[number].queue_pause = stored[0].queue_pause
    run_rounds(client, [_write(*each) for each in zip(partitions, writes, strict=True)])
    return stored


def remove_former_settings(partitions: Sequence[Partition], client: Client) -> None:
    """Remove the quotas and pauses of tenants that live elsewhere.

    Args:
        partitions: All partitions, with the map of the change.
        client: A redis client.
    """
    homes = partitions[0].homes
    stored = run_rounds(client, [_read(each) for each in partitions])
    writes = [
        StoredSettings(gone={quota_field(each) for each in own.tenants() if number not in homes.shares(each)})
        for number, own in enumerate(stored)
    ]
    run_rounds(client, [_write(*each) for each in zip(partitions, writes, strict=True)])


def divide_quotas(partitions: Sequence[Partition], client: Client) -> None:
    """Give each share of a spread tenant its final part of the quota, when no other partition serves it.

    Args:
        partitions: All partitions, with the map of the change.
        client: A redis client.
    """
    homes = partitions[0].homes
    for tenant in homes.spreads:
        field_name, shares = quota_field(tenant), homes.shares(tenant)
        packed = run_rounds(client, [_read_quota(partitions[number], field_name) for number in shares])
        changed = []
        for share, (number, each) in enumerate(zip(shares, packed, strict=True)):
            divided = None if each is None else Quota.unpack(each).pack(share, len(shares))
            if divided is not None and divided != each:
                client.hset(partitions[number].keys.quotas, field_name, divided)
                changed.append(partitions[number].place_held_back([tenant]))
        run_all(changed, client)


def _read_quota(partition: Partition, field_name: str) -> Rounds[bytes | None]:
    (packed,) = yield lambda pipe: pipe.hget(partition.keys.quotas, field_name)
    return None if packed is None else bytes(packed)


def _tenants_of(fields: Iterable[str]) -> set[str]:
    prefix = quota_field("")
    return {name[len(prefix) :] for name in fields if name.startswith(prefix)}


def _read(partition: Partition) -> Rounds[StoredSettings]:
    keys = partition.keys
    quotas = yield from scan_all("hash", keys.quotas)
    infos = yield from scan_all("hash", keys.quota_info)
    pauses = yield from scan_all("zset", keys.pauses)
    ends = yield from scan_all("zset", keys.pause_ends)
    tombstones = yield from scan_all("zset", keys.tombstones)
    (fields,) = yield lambda pipe: pipe.hmget(keys.state, PAUSE_FIELDS)
    queue_pause = {name: each or b"0" for name, each in zip(PAUSE_FIELDS, fields, strict=True)}
    return StoredSettings(quotas, infos, pauses, ends, queue_pause, tombstones)


def _write(partition: Partition, stored: StoredSettings) -> Rounds[None]:
    keys = partition.keys
    gone = [*stored.gone]
    for start in range(0, len(gone), CHUNK):
        yield partial(_put_removals, partition=partition, gone=gone[start : start + CHUNK])
    for key, fields in ((keys.quotas, stored.quotas), (keys.quota_info, stored.infos)):
        for part in _parts(fields):
            yield partial(_put_hash, key=key, part=part)
    for key, scores in (
        (keys.pauses, stored.pauses),
        (keys.pause_ends, stored.pause_ends),
        (keys.tombstones, stored.tombstones),
    ):
        for part in _parts(scores):
            yield partial(_put_zset, key=key, part=part)
    if stored.queue_pause:
        yield partial(_put_hash, key=keys.state, part=stored.queue_pause)
    if stored.gone or stored.pause_ends:
        (first,) = yield lambda pipe: pipe.zrange(keys.pause_ends, 0, 0, withscores=True)
        resume_at = {"resume_at": int(first[0][1]) if first else 0}
        yield partial(_put_hash, key=keys.state, part=resume_at)


def _parts(fields: dict[bytes, Any]) -> Iterator[dict[bytes, Any]]:
    pairs = [*fields.items()]
    for start in range(0, len(pairs), CHUNK):
        yield dict(pairs[start : start + CHUNK])


def _put_removals(pipe: Any, *, partition: Partition, gone: list[str]) -> None:
    pipe.hdel(partition.keys.quotas, *gone)
    pipe.hdel(partition.keys.quota_info, *gone)
    if tenants := _tenants_of(gone):
        pipe.zrem(partition.keys.pauses, *tenants)
        pipe.zrem(partition.keys.pause_ends, *tenants)


def _put_hash(pipe: Any, *, key: str, part: dict[Any, Any]) -> None:
    pipe.hset(key, mapping=part)


def _put_zset(pipe: Any, *, key: str, part: dict[bytes, float]) -> None:
    pipe.zadd(key, part)
