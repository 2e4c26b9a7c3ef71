"""Change the number of partitions of a queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from celery_dq.app.api.broker import BrokerAccess, partitions_of, stored_maps
from celery_dq.app.api.progress import OnProgress, ignore_progress
from celery_dq.app.api.tenant_moves import TenantMoves
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.pauses import PAUSE_FIELDS
from celery_dq.inspector.redis_values import CHUNK, Client, check_count, check_seconds, scan_all, text
from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA, quota_field
from celery_dq.options.sections import MAX_PARTITIONS, Options
from celery_dq.transport.redis.store.move_calls import set_map
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds
from celery_dq.transport.redis.store.script_batches import run_all
from celery_dq.transport.redis.store.whole_queue import namesake_of

__all__ = ["PartitionsChange", "set_partitions"]

#: Seconds between two looks for tenants whose running tasks have ended.
LOOK_EVERY_S = 0.05
_OF_ALL = (DEFAULT_QUOTA, CONFIG_QUOTA)


@dataclass(frozen=True)
class PartitionsChange:
    """A change of the number of partitions of a queue.

    Attributes:
        queue: Name of the queue.
        before: Number of partitions before.
        after: Number of partitions now.
        moved: Number of messages that this call has moved to their tenants' new homes.
        moving: Number of tenants whose moves have not ended, because their tasks run or they have messages
            with dedup keys; 0 when the change is complete.
        is_complete: Whether the change is complete. Else the same call goes on with it.
    """

    queue: str
    before: int
    after: int
    moved: int = 0
    moving: int = 0
    is_complete: bool = True


@dataclass
class _Stored:
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

    def changed_tenants(self, former: _Stored) -> set[str]:
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

    def add(self, other: _Stored, tenants: set[str], fields: Sequence[str] = ()) -> None:
        """Add the quotas and pauses that another partition stores for these tenants, and these fields."""
        names = {quota_field(tenant) for tenant in tenants}.union(fields)
        self.quotas |= {name: each for name, each in other.quotas.items() if text(name) in names}
        self.infos |= {name: each for name, each in other.infos.items() if text(name) in names}
        self.pauses |= {name: each for name, each in other.pauses.items() if text(name) in tenants}
        self.pause_ends |= {name: each for name, each in other.pause_ends.items() if text(name) in tenants}


def set_partitions(
    broker: BrokerAccess,
    options: Options,
    queue: str,
    count: int,
    timeout_s: float = 60.0,
    on_progress: OnProgress = ignore_progress,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> PartitionsChange:
    """Change the number of partitions of a queue, and move tenants to their new homes.

    Own quotas, pauses, messages and dead letters follow their tenants. Partition 0 decides: as soon as it has
    the new map, clients that know the old one are refused, and publish again by the new one. A second call
    goes on with a change that was interrupted.

    Args:
        broker: Access to the broker.
        options: The app's settings.
        queue: Name of the queue.
        count: The new number.
        timeout_s: Longest wait, in seconds, for tasks that run.
        on_progress: Called with the number of messages that were moved.
        sleep: Waits between two looks.

    Raises:
        InvalidRequest: The number is not from 1 to 4096, the queue is a singleton queue, another queue has
            the name of a partition, another change is under way, or messages wait for sets of resources.
    """
    check_count("partitions", count)
    check_seconds("timeout", timeout_s)
    if count > MAX_PARTITIONS:
        raise InvalidRequest(f"partitions = {count}: give a whole number from 1 to {MAX_PARTITIONS}")
    if count > 1 and any(each.name == queue for each in options.singletons):
        raise InvalidRequest(f"{queue!r} is a singleton queue, which has one partition")
    with (
        broker.channel() as channel,
        broker.audit.change(channel.client, "partitions_set", queue) as audited,
    ):
        client = channel.client
        namesake = namesake_of(queue, count, channel.context.registry_key, client) if count > 1 else None
        if namesake is not None:
            raise InvalidRequest(
                f"{namesake!r} is another queue, and would be the name of a partition: empty and delete it "
                f"(celery amqp queue.delete {namesake}), or give one of the two another name"
            )
        (homes,) = stored_maps(channel, [queue], declare=False)
        before = homes.count if homes.before is None else homes.before
        if homes.before is not None and homes.count != count:
            raise InvalidRequest(
                f"A change of {queue!r} to {homes.count} partitions is not complete. Complete it first: "
                f"celery dq partitions {queue} --set {homes.count}"
            )
        if homes.before is None:
            _check_no_sets(queue, count, partitions_of(channel, queue, homes), client)
            now = homes.begin(count)
            # The quotas are in the future homes before the first message.
            future = partitions_of(channel, queue, now)
            copied = _copy(future, client)
            homes = _decide(future[0], client, homes, now)
            # Until the decision, other clients knew the former homes only.
            _copy(future, client, copied)
        partitions = partitions_of(channel, queue, homes)
        run_all([each.declare_partitions(homes, "follow") for each in partitions[1:]], client)
        audited.count, audited.details = 1, f"{before} -> {count}"
        moves = TenantMoves(client, partitions, options.queue(queue).head_start_us, on_progress)
        waited = 0.0
        while (moving := moves.step()) or not moves.end():
            if waited >= timeout_s:
                return PartitionsChange(queue, before, count, moves.moved, moving, False)
            sleep(LOOK_EVERY_S)
            waited += LOOK_EVERY_S
        ended = _decide(partitions[0], client, homes, homes.end())
        run_all([each.declare_partitions(ended, "follow") for each in partitions[1:]], client)
        _remove(partitions, client)
    return PartitionsChange(queue, before, count, moves.moved)


def _check_no_sets(queue: str, count: int, partitions: Sequence[Partition], client: Client) -> None:
    sets = count > 1 and client.zrange(partitions[0].keys.resource_sets, 0, 0)
    if sets:
        raise InvalidRequest(
            f"Messages of {queue!r} wait for {text(sets[0])!r}, whose resources must be in one partition: "
            f"let workers take them, or move them to another queue, and publish no others"
        )


def _decide(first: Partition, client: Client, before: PartitionMap, now: PartitionMap) -> PartitionMap:
    stored = set_map(first, before, now).run(client)
    if stored != now:
        raise InvalidRequest(
            f"Another change of the partitions of queue {first.keys.queue!r} is under way: run it again"
        )
    return now


# A future home serves none of these tenants yet, so plain writes are enough: none has to be placed again.


def _copy(
    partitions: Sequence[Partition], client: Client, former: Sequence[_Stored] | None = None
) -> list[_Stored]:
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
    seen = former or [_Stored() for _ in partitions]
    writes = [_Stored() for _ in partitions]
    known = {name for each in seen for name in each.tombstones}
    tombstones = {name: end for each in stored for name, end in each.tombstones.items() if name not in known}
    for number, each in enumerate(stored):
        writes[number].tombstones = tombstones  # the tenant of a task that comes later is not known
        for tenant in each.changed_tenants(seen[number]):
            home = homes.home(tenant)
            if homes.old_home(tenant) != number:
                if not former:
                    writes[number].gone.add(quota_field(tenant))  # an interrupted change has left it
            elif home != number:
                writes[home].gone.add(quota_field(tenant))
                writes[home].add(each, {tenant})
    if stored[0].of_all() != seen[0].of_all():
        for number in range(homes.before or 0, homes.count):
            writes[number].gone.update(_OF_ALL)
            writes[number].add(stored[0], set(), _OF_ALL)
            writes[number].queue_pause = stored[0].queue_pause
    run_rounds(client, [_write(*each) for each in zip(partitions, writes, strict=True)])
    return stored


def _remove(partitions: Sequence[Partition], client: Client) -> None:
    """Remove the quotas and pauses of tenants that live elsewhere."""
    homes = partitions[0].homes
    stored = run_rounds(client, [_read(each) for each in partitions])
    writes = [
        _Stored(gone={quota_field(each) for each in own.tenants() if homes.home(each) != number})
        for number, own in enumerate(stored)
    ]
    run_rounds(client, [_write(*each) for each in zip(partitions, writes, strict=True)])


def _tenants_of(fields: Iterable[str]) -> set[str]:
    prefix = quota_field("")
    return {name[len(prefix) :] for name in fields if name.startswith(prefix)}


def _read(partition: Partition) -> Rounds[_Stored]:
    keys = partition.keys
    quotas = yield from scan_all("hash", keys.quotas)
    infos = yield from scan_all("hash", keys.quota_info)
    pauses = yield from scan_all("zset", keys.pauses)
    ends = yield from scan_all("zset", keys.pause_ends)
    tombstones = yield from scan_all("zset", keys.tombstones)
    (fields,) = yield lambda pipe: pipe.hmget(keys.state, PAUSE_FIELDS)
    queue_pause = {name: each or b"0" for name, each in zip(PAUSE_FIELDS, fields, strict=True)}
    return _Stored(quotas, infos, pauses, ends, queue_pause, tombstones)


def _write(partition: Partition, stored: _Stored) -> Rounds[None]:
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
