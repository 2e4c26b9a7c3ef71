"""Snapshots of the dedup locks of a queue."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from celery_dq.inspector.redis_values import Client, chunks, first_of, scan, text
from celery_dq.inspector.waiting import waiting_of
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.record import DedupSection, RedisRecord

_CLAIM = struct.Struct(">dddBHHH")


@dataclass(frozen=True)
class DedupLockSnapshot:
    """The state of one dedup lock. Calls are given as task ids, ``""`` for none.

    Attributes:
        tenant: Tenant of the key.
        key: The dedup key.
        head: The call that runs, or waits for a worker.
        heir: A retry of the head, which runs before the tail.
        tail: The call that waits for the end of the head.
        running: Whether a worker has the head.
        token: Fencing token of the run; 0 when the head does not run.
        age_s: Seconds since a worker got the head; None when no worker has it.
        timeout_s: Seconds after which the run may be evicted; None for never.
        followers: Number of calls that wait for the result of the head.
        worker: Worker that renews the lock, on another broker; ``""`` on a broker of celery-dq.
    """

    tenant: str
    key: str
    head: str
    heir: str
    tail: str
    running: bool
    token: int
    age_s: float | None
    timeout_s: float | None
    followers: int
    worker: str = ""


def scope(tenant: str, key: str) -> bytes:
    """Return the field of a dedup key in the hash of dedup locks."""
    name = tenant.encode()
    return str(len(name)).encode() + b":" + name + key.encode()


def inspect(partition: Partition, client: Client, tenant: str, key: str) -> DedupLockSnapshot | None:
    """Return the dedup lock of a key; None when no call holds it."""
    field = scope(tenant, key)
    packed = client.hget(partition.keys.dedup_locks, field)
    return None if packed is None else _snapshot(partition, client, field, packed, _now(client))


def dedup_lock_of(partition: Partition, client: Client, message_id: str) -> DedupLockSnapshot | None:
    """Return the dedup lock of which a message is head, heir or tail; None without one."""
    field = client.hget(partition.keys.dedup_members, message_id)
    packed = None if field is None else client.hget(partition.keys.dedup_locks, field)
    return None if packed is None else _snapshot(partition, client, field, packed, _now(client))


def list_dedup_locks(partition: Partition, client: Client, limit: int) -> list[DedupLockSnapshot]:
    """Return up to `limit` dedup locks, in no particular order."""
    now = _now(client)
    found: list[DedupLockSnapshot] = []
    for field, packed in _all(partition, client):
        if len(found) >= limit:
            break
        found.append(_snapshot(partition, client, field, packed, now))
    return found


def sample_keys(partition: Partition, client: Client, limit: int) -> list[str]:
    """Return the keys of up to `limit` waiting messages, in the order of their publication.

    The key of a message without a dedup key is made from its task and all its arguments.
    """
    waiting: list[tuple[float, str]] = []
    keys = partition.keys
    for place in (keys.turn, keys.throttled, keys.at_concurrency, keys.paused):
        tenants = [text(tenant) for tenant, _ in first_of(client, place, limit)]
        for found in waiting_of(keys, client, tenants, limit):
            waiting += [(score, text(message_id)) for message_id, score in found]
    ids = [message_id for _, message_id in sorted(waiting)[:limit]]
    records = (raw for chunk in chunks(ids) for raw in client.hmget(keys.messages, chunk))
    return [_key_of(raw) for raw in records if raw]


def _key_of(raw: bytes) -> str:
    record = RedisRecord.unpack(raw)
    if record.dedup:
        return f"{record.tenant}:{DedupSection.unpack(record.dedup).key}"
    body = record.body if isinstance(record.body, str) else record.body.hex()
    try:
        args, kwargs = json.loads(body)[:2]
    except (ValueError, TypeError):
        return f"{record.tenant}:{record.task}:{body}"
    return f"{record.tenant}:{record.task}:{json.dumps([args, kwargs], sort_keys=True)}"


def verdicts(partition: Partition, client: Client) -> dict[str, int]:
    """Return how often each verdict was given since the queue was made."""
    given = {text(name): int(count) for name, count in client.hgetall(partition.keys.verdicts).items()}
    # Most ACCEPT verdicts are counted in the hash `state`, which the scripts write anyway.
    accepted = int(client.hget(partition.keys.state, "accepted") or 0) + given.pop("accept", 0)
    return {"accept": accepted, **given} if accepted else given


def _all(partition: Partition, client: Client) -> Iterator[tuple[bytes, bytes]]:
    for chunk in scan(client, "hash", partition.keys.dedup_locks):
        yield from chunk


def _now(client: Client) -> float:
    seconds, micros = client.time()
    return int(seconds) + int(micros) / 1e6


def _snapshot(
    partition: Partition, client: Client, field: bytes, packed: bytes, now: float
) -> DedupLockSnapshot:
    size, _, rest = field.partition(b":")
    since, number, timeout, _, *sizes = _CLAIM.unpack_from(packed)
    ids, names = packed[_CLAIM.size :], []
    for length in sizes:
        names.append(ids[:length].decode())
        ids = ids[length:]
    head, heir, tail = names
    return DedupLockSnapshot(
        tenant=rest[: int(size)].decode(),
        key=rest[int(size) :].decode(),
        head=task_id_of(head),
        heir=task_id_of(heir),
        tail=task_id_of(tail),
        running=number > 0,
        token=int(number),
        age_s=max(now - since / 1e6, 0.0) if since else None,
        timeout_s=timeout / 1e6 or None,
        followers=int(client.llen(partition.keys.followers(head))),
    )
