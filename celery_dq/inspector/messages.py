"""Single messages: what waits next, and where one task is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any

from celery_dq.errors import CorruptRecord
from celery_dq.inspector.reading import Client, moment, scan, text
from celery_dq.inspector.waiting import waiting_of
from celery_dq.transport import envelope
from celery_dq.transport.redis.ids import task_id_of
from celery_dq.transport.redis.partition import Partition
from celery_dq.transport.redis.record import HEADER_SIZE, Record


@dataclass(frozen=True)
class MessageSnapshot:
    """A message in a queue.

    :param id: the message id: the task id, with ``~1`` … when that was taken.
    :param state: ``waiting``, ``delayed``, ``claimed`` (a consumer has it), ``settled`` (its task has
        started and it is never delivered again), ``discarded`` (a worker has still to record that it
        will not run), ``dead``, or ``cancelled`` (not published yet; it will not run when it is).
    :param due: when a delayed message is due; None for one that may run at once.
    :param expires: from when on it must not run; None for never.
    :param args: Celery's short representation of the arguments.
    :param consumer: who has it; "" unless claimed.
    :param deliveries: deliveries so far that ended in a crash.
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
    """Read what waits, roughly as it will be served, without taking it.

    Arguments:
        partition: Where.
        client: A redis client.
        limit: How many messages at most.
        tenant: Only of this tenant, in its own order. Default: one message of each tenant, in the order
            of their turns, the throttled, limited and paused ones last; then the next of each.
    """
    keys = partition.keys
    if tenant is not None:
        ids = [each for each, _ in waiting_of(keys, client, [tenant], limit)[0]]
    else:
        tenants: list[bytes] = []
        for key in (keys.turn, keys.throttled, keys.limited, keys.parked):
            tenants += client.zrange(key, 0, limit - 1 - len(tenants)) if len(tenants) < limit else []
        lines = waiting_of(keys, client, [text(name) for name in tenants], limit)
        ids = list(islice(_by_turns([[each for each, _ in line] for line in lines]), limit))
    return described(partition, client, [text(each) for each in ids], "waiting")


def _by_turns(lists: Sequence[Sequence[bytes]]) -> Iterator[bytes]:
    for place in range(max(map(len, lists), default=0)):
        for ids in lists:
            if place < len(ids):
                yield ids[place]


def peek_delayed(partition: Partition, client: Client, limit: int = 10) -> list[MessageSnapshot]:
    """Read what waits for its ETA, the earliest first."""
    ids = client.zrange(partition.keys.delayed, 0, limit - 1)
    return described(partition, client, [text(each) for each in ids], "delayed")


def described(partition: Partition, client: Client, ids: list[str], state: str) -> list[MessageSnapshot]:
    """Read the records of messages; an id that has gone meanwhile is left out."""
    if not ids:
        return []
    keys = partition.keys
    pipeline = client.pipeline(transaction=False)
    pipeline.hmget(keys.messages, ids)
    pipeline.hmget(keys.deliveries, ids)
    records, deliveries = pipeline.execute()
    return [
        replace(message_of(raw, message_id, keys.queue, state), deliveries=int(count or 0))
        for message_id, raw, count in zip(ids, records, deliveries, strict=True)
        if raw is not None
    ]


def find(partition: Partition, client: Client, task_id: str) -> MessageSnapshot | None:
    """Return where a task is in this partition, None when it is not here (or has finished)."""
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
    """Read a record; of one that is unreadable, or gone but for its marker, only the id is known."""
    message = MessageSnapshot(message_id, queue, state)
    if len(raw) < HEADER_SIZE:
        return message
    try:
        record = Record.unpack(raw)
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
    """Yield, in chunks, the task ids of a tenant's delayed messages: they are in no list of the tenant."""
    for chunk in scan(client, "zset", partition.keys.delayed):
        ids = [text(message_id) for message_id, _ in chunk]
        records = client.hmget(partition.keys.messages, ids) if ids else []
        yield [
            task_id_of(message_id)
            for message_id, raw in zip(ids, records, strict=True)
            if raw and _heading(raw)[0] == tenant
        ]


def _heading(raw: bytes) -> tuple[str | None, str | None]:
    """Return tenant and task of a record; of an unreadable one, None."""
    if len(raw) < HEADER_SIZE:
        return None, None
    try:
        record = Record.unpack(raw)
    except CorruptRecord:
        return None, None
    return record.tenant, record.task
