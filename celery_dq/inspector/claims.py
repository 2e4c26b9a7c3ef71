"""Dedup claims of a queue, read from Redis."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from celery_dq.inspector.reading import Client, scan, text
from celery_dq.inspector.waiting import waiting_of
from celery_dq.transport.redis.ids import task_id_of
from celery_dq.transport.redis.partition import Partition
from celery_dq.transport.redis.record import DedupSection, Record

_CLAIM = struct.Struct(">dddBHHH")


@dataclass(frozen=True)
class ClaimSnapshot:
    """Who has a dedup key, and who waits for it. Task ids; ``""`` for nobody.

    Attributes:
        tenant: whose key.
        key: the key.
        head: who runs, or waits for a worker.
        heir: a retry of the head, which comes before the tail.
        tail: who waits for the head to end.
        running: a worker has the head.
        token: fencing token of the run; 0 when none runs.
        age_s: seconds since a worker got the head; 0 when none has.
        timeout_s: seconds after which the run may be evicted; None is never.
        followers: how many calls wait for the head's result.
        worker: who keeps the claim alive, on a broker that is none of ours; ``""`` on one that is.
    """

    tenant: str
    key: str
    head: str
    heir: str
    tail: str
    running: bool
    token: int
    age_s: float
    timeout_s: float | None
    followers: int
    worker: str = ""


def scope(tenant: str, key: str) -> bytes:
    """Return the field of a key in the hash of claims."""
    name = tenant.encode()
    return str(len(name)).encode() + b":" + name + key.encode()


def inspect(partition: Partition, client: Client, tenant: str, key: str) -> ClaimSnapshot | None:
    """Return how a key stands, None when nobody has it."""
    field = scope(tenant, key)
    packed = client.hget(partition.keys.claims, field)
    return None if packed is None else _snapshot(partition, client, field, packed, _now(client))


def claim_of(partition: Partition, client: Client, message_id: str) -> ClaimSnapshot | None:
    """Return the claim that a message is head, heir or tail of; None when it is of none."""
    field = client.hget(partition.keys.claimants, message_id)
    packed = None if field is None else client.hget(partition.keys.claims, field)
    return None if packed is None else _snapshot(partition, client, field, packed, _now(client))


def list_claims(partition: Partition, client: Client, limit: int) -> list[ClaimSnapshot]:
    """Return up to `limit` claims, in no order."""
    now = _now(client)
    found: list[ClaimSnapshot] = []
    for field, packed in _all(partition, client):
        if len(found) >= limit:
            break
        found.append(_snapshot(partition, client, field, packed, now))
    return found


def sample_keys(partition: Partition, client: Client, limit: int) -> list[str]:
    """Return the keys of up to `limit` waiting messages, in the order of their publication.

    A message without a dedup key counts as its task with all its arguments.
    """
    waiting: list[tuple[float, str]] = []
    keys = partition.keys
    for place in (keys.turn, keys.throttled, keys.limited, keys.parked):
        tenants = [text(tenant) for tenant in client.zrange(place, 0, limit - 1)]
        for found in waiting_of(keys, client, tenants, limit):
            waiting += [(score, text(message_id)) for message_id, score in found]
    ids = [message_id for _, message_id in sorted(waiting)[:limit]]
    records = client.hmget(keys.messages, ids) if ids else []
    return [_key_of(raw) for raw in records if raw]


def _key_of(raw: bytes) -> str:
    record = Record.unpack(raw)
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
    # The most frequent one is counted where the scripts write anyway.
    accepted = int(client.hget(partition.keys.state, "accepted") or 0) + given.pop("accept", 0)
    return {"accept": accepted, **given} if accepted else given


def _all(partition: Partition, client: Client) -> Iterator[tuple[bytes, bytes]]:
    for chunk in scan(client, "hash", partition.keys.claims):
        yield from chunk


def _now(client: Client) -> float:
    seconds, micros = client.time()
    return int(seconds) + int(micros) / 1e6


def _snapshot(partition: Partition, client: Client, field: bytes, packed: bytes, now: float) -> ClaimSnapshot:
    size, _, rest = field.partition(b":")
    since, number, timeout, _, *sizes = _CLAIM.unpack_from(packed)
    ids, names = packed[_CLAIM.size :], []
    for length in sizes:
        names.append(ids[:length].decode())
        ids = ids[length:]
    head, heir, tail = names
    return ClaimSnapshot(
        tenant=rest[: int(size)].decode(),
        key=rest[int(size) :].decode(),
        head=task_id_of(head),
        heir=task_id_of(heir),
        tail=task_id_of(tail),
        running=number > 0,
        token=int(number),
        age_s=max(now - since / 1e6, 0.0) if since else 0.0,
        timeout_s=timeout / 1e6 or None,
        followers=int(client.llen(partition.keys.followers(head))),
    )
