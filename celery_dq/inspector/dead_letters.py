"""Snapshots of dead letters, with their reasons."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_dq.inspector.messages import message_of
from celery_dq.inspector.redis_values import CHUNK, Client, first_of, moment, text
from celery_dq.transport.redis.store.partition import Partition


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter.

    Attributes:
        id: The message id.
        queue: Name of the queue.
        reason: Why the message became a dead letter.
        worker: Worker that had it last; "" when none had.
        at: When it became a dead letter.
        deliveries: Number of deliveries that ended in a crash.
        task: Name of the task.
        tenant: Tenant of the message.
        args: Celery's short representation of the positional arguments.
        kwargs: Celery's short representation of the named arguments.
    """

    id: str
    queue: str
    reason: str
    worker: str = ""
    at: datetime | None = None
    deliveries: int = 0
    task: str = ""
    tenant: str = ""
    args: str = ""
    kwargs: str = ""


def list_dead_letters(
    partition: Partition, client: Client, limit: int = 100, offset: int = 0
) -> list[DeadLetter]:
    """Read dead letters, the latest first."""
    letters: list[DeadLetter] = []
    for start in range(offset, offset + limit, CHUNK):
        end = min(start + CHUNK, offset + limit)
        part = _list_chunk(partition, client, start, end)
        letters += part
        if len(part) < end - start:
            break
    return letters


def _list_chunk(partition: Partition, client: Client, start: int, end: int) -> list[DeadLetter]:
    keys = partition.keys
    found = client.zrevrange(keys.dead_index, start, end - 1, withscores=True)
    if not found:
        return []
    ids = [text(message_id) for message_id, _ in found]
    pipeline = client.pipeline(transaction=False)
    pipeline.hmget(keys.dead, ids)
    pipeline.hmget(keys.dead_info, ids)
    records, infos = pipeline.execute()
    return [
        _dead_letter(message_id, keys.queue, score, raw or b"", info)
        for message_id, (_, score), raw, info in zip(ids, found, records, infos, strict=True)
    ]


def dead_ids(partition: Partition, client: Client, limit: int) -> list[str]:
    """Return the ids of the oldest dead letters."""
    return [text(each) for each, _ in first_of(client, partition.keys.dead_index, limit)]


def _dead_letter(message_id: str, queue: str, at_us: float, raw: bytes, info: bytes | None) -> DeadLetter:
    known: dict[str, Any] = json.loads(info) if info else {}
    message = message_of(raw, message_id, queue, "dead")
    return DeadLetter(
        id=message_id,
        queue=queue,
        reason=str(known.get("reason", "unknown")),
        worker=str(known.get("worker", "")),
        at=moment(at_us),
        deliveries=int(known.get("deliveries", 0)),
        task=message.task or str(known.get("task", "")),
        tenant=message.tenant or str(known.get("tenant", "")),
        args=message.args,
        kwargs=message.kwargs,
    )
