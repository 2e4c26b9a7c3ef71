"""Snapshots of single messages: the next ones of a queue, and the place of one task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any

from celery_dq.errors import CorruptRecord
from celery_dq.inspector.redis_values import Client, chunks, first_of, moment, scan, text
from celery_dq.inspector.waiting import waiting_of
from celery_dq.transport import envelope
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.record import HEADER_SIZE, RedisRecord


@dataclass(frozen=True)
class MessageSnapshot:
    """A message in a queue.

    Attributes:
        id: The message id: the task id, with ``~1`` … when that id was taken.
        queue: Name of the queue.
        state: ``waiting``, ``delayed``, ``claimed`` (a consumer has it), ``settled`` (its task has started
            and is never delivered again), ``discarded`` (a worker has still to record that it will not run),
            ``dead``, or ``cancelled`` (cancelled before it was published).
        task: Name of the task.
        tenant: Tenant of the message.
        priority: Priority, 0 to 9.
        due: When a delayed message is due; None for one without an ETA.
        expires: When the message expires; None for never.
        args: Celery's short representation of the positional arguments.
        kwargs: Celery's short representation of the named arguments.
        consumer: Consumer that has the message; "" unless claimed.
        deliveries: Number of deliveries so far that ended in a crash.
    """

    id: str
    queue: str
    state: str
    task: str = ""
    tenant: str = ""
    priority: int = 0
    due: datetime | None = None
    expires: datetime | None = None
    args: str = ""
    kwargs: str = ""
    consumer: str = ""
    deliveries: int = 0


def peek(
    partition: Partition, client: Client, limit: int = 10, tenant: str | None = None
) -> list[MessageSnapshot]:
    """Read the next waiting messages, roughly in order of service, without claiming them.

    Args:
        partition: The partition of the queue.
        client: A redis client.
        limit: Number of messages, at most.
        tenant: Only messages of this tenant, in order. Default: one message of each tenant in order of turn,
            those of throttled, limited and paused tenants last; then the second of each tenant, and so on.
    """
    keys = partition.keys
    if tenant is not None:
        ids = [each for each, _ in waiting_of(keys, client, [tenant], limit)[0]]
    else:
        tenants: dict[str, None] = {}
        for key in (keys.turn, keys.throttled, keys.at_concurrency, keys.paused):
            tenants.update(
                (text(name), None) for name, _ in first_of(client, key, max(limit - len(tenants), 0))
            )
        ids = list(islice(_by_turns(_enough_of(partition, client, list(tenants), limit)), limit))
    return described(partition, client, [text(each) for each in ids], "waiting")


def _enough_of(partition: Partition, client: Client, tenants: list[str], limit: int) -> list[list[bytes]]:
    """Return the waiting messages of each tenant, enough for `limit` messages taken in turns."""
    depth = -(-limit // max(len(tenants), 1))
    while True:
        lines = waiting_of(partition.keys, client, tenants, depth)
        if sum(map(len, lines)) >= limit or all(len(line) < depth for line in lines):
            return [[each for each, _ in line] for line in lines]
        depth = min(depth * 2, limit)


def _by_turns(lists: Sequence[Sequence[bytes]]) -> Iterator[bytes]:
    for place in range(max(map(len, lists), default=0)):
        for ids in lists:
            if place < len(ids):
                yield ids[place]


def peek_delayed(partition: Partition, client: Client, limit: int = 10) -> list[MessageSnapshot]:
    """Read the messages that wait for their ETA, the earliest first."""
    ids = first_of(client, partition.keys.delayed, limit)
    return described(partition, client, [text(each) for each, _ in ids], "delayed")


def described(partition: Partition, client: Client, ids: list[str], state: str) -> list[MessageSnapshot]:
    """Read the records of messages. Ids without a record are left out."""
    keys = partition.keys
    found = []
    for chunk in chunks(ids):
        pipeline = client.pipeline(transaction=False)
        pipeline.hmget(keys.messages, chunk)
        pipeline.hmget(keys.deliveries, chunk)
        records, deliveries = pipeline.execute()
        found += [
            replace(message_of(raw, message_id, keys.queue, state), deliveries=int(count or 0))
            for message_id, raw, count in zip(chunk, records, deliveries, strict=True)
            if raw is not None
        ]
    return found


def find(partition: Partition, client: Client, task_id: str) -> MessageSnapshot | None:
    """Return the message of a task in this partition; None when it is not here or has finished."""
    place = partition.locate(task_id).run(client)
    if not place:
        return None
    message_id, state = place["id"], place["state"]
    keys = partition.keys
    raw = client.hget(keys.dead if state == "dead" else keys.messages, message_id)
    message = message_of(raw or b"", message_id, keys.queue, state)
    return replace(
        message,
        tenant=message.tenant or place.get("tenant", ""),
        consumer=place.get("consumer", ""),
        deliveries=int(place.get("deliveries") or 0),
    )


def message_of(raw: bytes, message_id: str, queue: str, state: str) -> MessageSnapshot:
    """Read a record. Of an unreadable record, or of the marker of a settled one, only the id is known."""
    message = MessageSnapshot(message_id, queue, state)
    if len(raw) < HEADER_SIZE:
        return message
    try:
        record = RedisRecord.unpack(raw)
        headers: dict[str, Any] = envelope.unpack(record.envelope)[0]
    except CorruptRecord as exc:
        return replace(message, args=f"unreadable: {exc}")
    return replace(
        message,
        task=record.task,
        tenant=record.tenant,
        priority=record.priority,
        due=moment(record.due_us),
        expires=moment(record.expires_us),
        args=str(headers.get("argsrepr") or ""),
        kwargs=str(headers.get("kwargsrepr") or ""),
    )


def ids_of_task(partition: Partition, client: Client, task: str) -> Iterator[list[str]]:
    """Yield, in chunks, the task ids of all messages of one task name."""
    for chunk in scan(client, "hash", partition.keys.messages):
        yield [task_id_of(text(message_id)) for message_id, raw in chunk if _heading(raw)[1] == task]


def delayed_ids_of_tenant(partition: Partition, client: Client, tenant: str) -> Iterator[list[str]]:
    """Yield, in chunks, the task ids of a tenant's delayed messages, which its own lists do not hold."""
    for chunk in scan(client, "zset", partition.keys.delayed):
        ids = [text(message_id) for message_id, _ in chunk]
        records = client.hmget(partition.keys.messages, ids) if ids else []
        yield [
            task_id_of(message_id)
            for message_id, raw in zip(ids, records, strict=True)
            if raw and _heading(raw)[0] == tenant
        ]


def _heading(raw: bytes) -> tuple[str | None, str | None]:
    """Return tenant and task of a record; None for both if it is unreadable."""
    if len(raw) < HEADER_SIZE:
        return None, None
    try:
        record = RedisRecord.unpack(raw)
    except CorruptRecord:
        return None, None
    return record.tenant, record.task
