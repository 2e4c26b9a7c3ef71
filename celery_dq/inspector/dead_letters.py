"""What was given up on, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_dq.inspector.messages import message_of
from celery_dq.inspector.reading import Client, moment, text
from celery_dq.transport.redis.partition import Partition


@dataclass(frozen=True)
class DeadLetter:
    """A message that was given up on.

    :param id: its message id.
    :param reason: why.
    :param worker: who had it last; "" when nobody had.
    :param at: when it was given up on.
    :param deliveries: deliveries that ended in a crash.
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
    keys = partition.keys
    found = client.zrevrange(keys.dead_index, offset, offset + limit - 1, withscores=True)
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
    return [text(each) for each in client.zrange(partition.keys.dead_index, 0, limit - 1)]


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
