"""Snapshots of the dedup locks of a queue."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import methodcaller
from typing import Any

from celery_dq.inspector.messages import waiting_of
from celery_dq.inspector.redis_values import Client, chunks, first_of, number, scan_all, text
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import Rounds, run_chosen, run_one, run_rounds

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


def tenant_and_key(field: bytes) -> tuple[str, str]:
    """Return the tenant and the dedup key of a field of the hash of dedup locks."""
    size, _, rest = field.partition(b":")
    return text(rest[: int(size)]), text(rest[int(size) :])


def inspect(partition: Partition, client: Client, tenant: str, key: str) -> DedupLockSnapshot | None:
    """Return the dedup lock of a key; None when no call holds it."""
    field = scope(tenant, key)
    packed = client.hget(partition.keys.dedup_locks, field)
    return None if packed is None else run_one(client, _snapshots(partition, [(field, packed)]))[0]


def dedup_lock_of(partition: Partition, client: Client, message_id: str) -> DedupLockSnapshot | None:
    """Return the dedup lock of which a message is head, heir or tail; None without one."""
    field = client.hget(partition.keys.dedup_members, message_id)
    packed = None if field is None else client.hget(partition.keys.dedup_locks, field)
    return None if packed is None else run_one(client, _snapshots(partition, [(field, packed)]))[0]


def list_dedup_locks(partitions: Sequence[Partition], client: Client, limit: int) -> list[DedupLockSnapshot]:
    """Return up to `limit` dedup locks, in no particular order."""
    found = run_rounds(client, [scan_all("hash", each.keys.dedup_locks, limit) for each in partitions])
    rows = [(partition, row) for partition, own in zip(partitions, found, strict=True) for row in own.items()]
    return run_chosen(client, rows[:limit], _snapshots)


def sample_keys(partitions: Sequence[Partition], client: Client, limit: int) -> list[str]:
    """Return the keys of up to `limit` waiting messages, in the order of their publication.

    The key of a message without a dedup key is made from its task and all its arguments.
    """
    rows = [
        (score, text(message_id), number)
        for number, own in enumerate(run_rounds(client, [_waiting_in(each, limit) for each in partitions]))
        for message_id, score in own
    ]
    chosen = [(partitions[number], message_id) for _, message_id, number in sorted(rows)[:limit]]
    return [_key_of(raw) for raw in run_chosen(client, chosen, _records) if raw]


def _waiting_in(partition: Partition, limit: int) -> Rounds[list[tuple[bytes, float]]]:
    keys = partition.keys
    waiting: list[tuple[bytes, float]] = []
    for place in (keys.turn, keys.resource_sets, keys.throttled, keys.at_concurrency, keys.paused):
        tenants = yield from first_of(place, limit)
        lines = yield from waiting_of(keys, [text(tenant) for tenant, _ in tenants], limit)
        for line in lines:
            waiting += line
    return waiting


def _records(partition: Partition, ids: list[str]) -> Rounds[list[bytes | None]]:
    records: list[bytes | None] = []
    for chunk in chunks(ids):
        (part,) = yield methodcaller("hmget", partition.keys.messages, chunk)
        records += part
    return records


def _key_of(raw: bytes) -> str:
    record = MessageRecord.unpack(raw)
    if record.dedup:
        return f"{record.tenant}:{DedupSection.unpack(record.dedup).key}"
    body = record.body if isinstance(record.body, str) else record.body.hex()
    try:
        args, kwargs = json.loads(body)[:2]
    except (ValueError, TypeError):
        return f"{record.tenant}:{record.task}:{body}"
    return f"{record.tenant}:{record.task}:{json.dumps([args, kwargs], sort_keys=True)}"


def verdicts(queues: Sequence[Sequence[Partition]], client: Client) -> list[dict[str, int]]:
    """Return how often each verdict was given since a queue was made, in the round trips of one queue.

    Args:
        queues: The partitions of each queue.
        client: A redis client.
    """
    counted = iter(run_rounds(client, [_verdicts_of(each) for partitions in queues for each in partitions]))
    found = []
    for partitions in queues:
        given: Counter[str] = Counter()
        for each in islice(counted, len(partitions)):
            given.update(each)
        found.append(dict(given))
    return found


def _verdicts_of(partition: Partition) -> Rounds[dict[str, int]]:
    keys = partition.keys

    def read(pipe: Any) -> None:
        pipe.hgetall(keys.verdicts)
        pipe.hget(keys.state, "accepted")

    counts, accepted = yield read
    given = {text(name): int(number(count)) for name, count in counts.items()}
    # Most ACCEPT verdicts are counted in the hash `state`, which the scripts write anyway.
    accepted = int(number(accepted)) + given.pop("accept", 0)
    return {"accept": accepted, **given} if accepted else given


def _snapshots(partition: Partition, locks: Sequence[tuple[bytes, bytes]]) -> Rounds[list[DedupLockSnapshot]]:
    unpacked = [_readable(field, packed) for field, packed in locks]

    def read(pipe: Any) -> None:
        pipe.time()
        for _, _, (head, _, _) in unpacked:
            pipe.llen(partition.keys.followers(head))

    (seconds, micros), *followers = yield read
    now_us = int(seconds) * 1_000_000 + int(micros)
    snapshots = []
    for ((tenant, key), (since, claim_number, timeout), (head, heir, tail)), count in zip(
        unpacked, followers, strict=True
    ):
        snapshot = DedupLockSnapshot(
            tenant=tenant,
            key=key,
            head=task_id_of(head),
            heir=task_id_of(heir),
            tail=task_id_of(tail),
            running=claim_number > 0,
            token=int(claim_number),
            age_s=max((now_us - since) / 1e6, 0.0) if since else None,
            timeout_s=timeout / 1e6 or None,
            followers=int(count),
        )
        snapshots.append(snapshot)
    return snapshots


def _readable(
    field: bytes, packed: bytes
) -> tuple[tuple[str, str], tuple[float, float, float], tuple[str, str, str]]:
    """Return the parts of a lock; of one that another program has written, its field only."""
    try:
        return tenant_and_key(field), *_unpacked(packed)
    except Exception:
        return ("", text(field)), (0.0, 0.0, 0.0), ("", "", "")


def _unpacked(packed: bytes) -> tuple[tuple[float, float, float], tuple[str, str, str]]:
    """Return since (µs), claim number and timeout (µs) of a lock; and the ids of head, heir and tail."""
    since, number, timeout, _, *sizes = _CLAIM.unpack_from(packed)
    ids, names = packed[_CLAIM.size :], []
    for length in sizes:
        names.append(ids[:length].decode())
        ids = ids[length:]
    head, heir, tail = names
    return (since, number, timeout), (head, heir, tail)
