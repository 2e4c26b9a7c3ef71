"""Change the number of partitions of an empty queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from celery_dq.app.api.broker import BrokerAccess, partitions_of, stored_counts
from celery_dq.app.api.move import Mover
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.messages import peek_delayed
from celery_dq.inspector.pauses import PAUSE_FIELDS
from celery_dq.inspector.queues import QueueSnapshot, queue_snapshot
from celery_dq.inspector.redis_values import CHUNK, Client, check_count, scan_all, text
from celery_dq.inspector.tenants import in_order_of_service
from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA, quota_field
from celery_dq.options.sections import MAX_PARTITIONS, Options
from celery_dq.transport.redis.store.home import home_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import AT_ONCE, Rounds, run_rounds
from celery_dq.transport.redis.store.script_batches import run_all
from celery_dq.transport.redis.store.whole_queue import namesake_of

__all__ = ["PartitionsChange", "set_partitions"]

_OF_ALL = (DEFAULT_QUOTA, CONFIG_QUOTA)


@dataclass(frozen=True)
class PartitionsChange:
    """A change of the number of partitions of a queue.

    Attributes:
        queue: Name of the queue.
        before: Number of partitions before.
        after: Number of partitions now.
        moved: Number of messages that were published during the change and moved to their tenants' homes.
    """

    queue: str
    before: int
    after: int
    moved: int = 0


@dataclass
class _Stored:
    """What a partition stores besides messages, or a part of it to write.

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

    def add(self, other: _Stored, tenants: set[str], fields: Sequence[str] = ()) -> None:
        """Add the quotas and pauses that another partition stores for these tenants, and these fields."""
        names = {quota_field(tenant) for tenant in tenants}.union(fields)
        self.quotas |= {name: each for name, each in other.quotas.items() if text(name) in names}
        self.infos |= {name: each for name, each in other.infos.items() if text(name) in names}
        self.pauses |= {name: each for name, each in other.pauses.items() if text(name) in tenants}
        self.pause_ends |= {name: each for name, each in other.pause_ends.items() if text(name) in tenants}


def set_partitions(broker: BrokerAccess, options: Options, queue: str, count: int) -> PartitionsChange:
    """Change the number of partitions of a queue without messages. Its consumers follow at a heartbeat.

    Own quotas and pauses follow their tenants to new homes. Partition 0 decides: as soon as it has the new
    number, clients that know the old one are refused, and publish again by the new one. A second call
    completes one that was interrupted.

    Raises:
        InvalidRequest: The number is not from 1 to 4096, the queue is a singleton queue, another queue has
            the name of a partition, or the queue has messages or in-flight messages, or dead letters in a
            partition that would go.
    """
    check_count("partitions", count)
    if count > MAX_PARTITIONS:
        raise InvalidRequest(f"partitions = {count}: give a whole number from 1 to {MAX_PARTITIONS}")
    if count > 1 and any(each.name == queue for each in options.singletons):
        raise InvalidRequest(f"{queue!r} is a singleton queue, which has one partition")
    head_start_us = options.queue(queue).head_start_us
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
        (before,) = stored_counts(channel, [queue], declare=False)
        known = _known(partitions_of(channel, queue, MAX_PARTITIONS), client)
        partitions = partitions_of(channel, queue, count) + tuple(
            channel.context.partition(queue, number, count) for number in range(count, max(before, known))
        )
        found = queue_snapshot(partitions, client, ages=False)
        _refuse_messages(queue, count, found)
        _copy(partitions, client, before, count)
        if not partitions[0].set_partitions(count).run(client):
            raise InvalidRequest(f"Messages were published to {queue!r} meanwhile; it keeps its partitions.")
        audited.count, audited.details = 1, f"{before} -> {count}"
        run_all([each.declare_partitions(count, "follow") for each in partitions[1:]], client)
        moved = sum(_move_all(each, partitions, client, count, head_start_us) for each in partitions[count:])
        _remove(partitions, client, count)
    return PartitionsChange(queue, before, count, moved)


def _known(partitions: Sequence[Partition], client: Client) -> int:
    """Return the number of partitions that store their number: more than partition 0 says after a crash."""
    known = 1
    for start in range(0, len(partitions), AT_ONCE):
        stored = run_rounds(client, [_number_in(each) for each in partitions[start : start + AT_ONCE]])
        if not any(stored):
            break
        known = max(start + place + 1 for place, count in enumerate(stored) if count is not None)
    return known


def _number_in(partition: Partition) -> Rounds[bytes | None]:
    ((count,),) = yield lambda pipe: pipe.hmget(partition.keys.state, "partitions")
    return None if count is None else bytes(count)


def _refuse_messages(queue: str, count: int, found: QueueSnapshot) -> None:
    waiting = found.waiting + found.delayed + found.discards
    if waiting or found.held:
        raise InvalidRequest(
            f"{queue!r} has messages ({waiting} wait, {found.held} in flight), and their tenants would get "
            f"other partitions. Let workers finish them, or run: celery dq purge {queue}"
        )
    dead = sum(each.dead for each in found.partitions[count:])
    if dead:
        raise InvalidRequest(
            f"{queue!r} has {dead} dead letters in partitions that would go: replay them, or run: "
            f"celery dq dead purge {queue} --all"
        )


# The partitions have no messages, so that plain writes are enough: no tenant has to be placed again.


def _copy(partitions: Sequence[Partition], client: Client, before: int, after: int) -> None:
    """Copy quotas and pauses to the future homes of their tenants, and to new partitions what all have."""
    stored = run_rounds(client, [_read(each) for each in partitions])
    writes = [_Stored() for _ in partitions]
    for number, each in enumerate(stored):
        for tenant in each.tenants():
            home = home_of(tenant, after)
            if home_of(tenant, before) != number:
                writes[number].gone.add(quota_field(tenant))  # an interrupted change has left it
            elif home != number:
                writes[home].add(each, {tenant})
    for number in range(before, after):
        writes[number].gone.update(_OF_ALL)
        writes[number].add(stored[0], set(), _OF_ALL)
        writes[number].tombstones = stored[0].tombstones
        writes[number].queue_pause = stored[0].queue_pause
    run_rounds(client, [_write(*each) for each in zip(partitions, writes, strict=True)])


def _remove(partitions: Sequence[Partition], client: Client, count: int) -> None:
    """Remove the quotas and pauses of tenants that live elsewhere."""
    stored = run_rounds(client, [_read(each) for each in partitions])
    writes = [
        _Stored(gone={quota_field(each) for each in own.tenants() if home_of(each, count) != number})
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


def _move_all(
    source: Partition, partitions: Sequence[Partition], client: Client, count: int, head_start_us: int
) -> int:
    """Move the messages that a partition got before it got the new number; return how many there were."""
    moved, step = 0, 1
    while step:
        step = 0
        for _, each in in_order_of_service([source], client, CHUNK):
            home = partitions[home_of(each.tenant, count)]
            step += Mover(source, home, client, head_start_us).move_tenant(each.tenant)
        for message in peek_delayed([source], client, CHUNK):
            home = partitions[home_of(message.tenant, count)]
            step += Mover(source, home, client, head_start_us).move([message.id])
        moved += step
    return moved
