"""One message with its headers and the times of its stay in the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery_dq.errors import CorruptRecord
from celery_dq.inspector.dead_letters import read_info
from celery_dq.inspector.messages import SCORE, MessageSnapshot, find_located
from celery_dq.inspector.redis_values import Client, moment, number
from celery_dq.options.sections import STRICT_HEAD_START_US
from celery_dq.transport import envelope
from celery_dq.transport.message_record import HEADER_SIZE, MessageRecord
from celery_dq.transport.redis.store.partition import Partition


@dataclass(frozen=True)
class MessageDetails:
    """A message, its headers, and the times that the broker knows of it.

    Attributes:
        message: The snapshot of the message.
        headers: Headers of the message, as Celery and the application have set them.
        content_type: Content type of the body.
        body_bytes: Size of the serialized body.
        in_line_since: When a waiting message was stored or due. With aging priorities that have changed
            since, it is wrong by up to nine steps.
        since: When its present state began: claimed by a worker, or given up on; None for other states.
        reason: Why a message became a dead letter or will not run; "" for others.
    """

    message: MessageSnapshot
    headers: Mapping[str, Any] = field(default_factory=dict)
    content_type: str = ""
    body_bytes: int = 0
    in_line_since: datetime | None = None
    since: datetime | None = None
    reason: str = ""


def message_details(partitions: Sequence[Partition], client: Client, task_id: str) -> MessageDetails | None:
    """Read a message of a queue in full; None when it is not in these partitions or has finished."""
    found = find_located(partitions, client, task_id)
    if not found:
        return None
    message, place, raw = found[0]
    partition = partitions[message.partition]
    headers: Mapping[str, Any] = {}
    content_type, size = "", 0
    if len(raw) >= HEADER_SIZE:
        try:
            record = MessageRecord.unpack(raw)
            headers, _, kind, _ = envelope.unpack(record.envelope)
        except CorruptRecord:
            pass  # the snapshot of the message names the fault
        else:
            content_type = str(kind or "")
            body = record.body
            size = len(body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body)
    reason = place.get("reason", "")
    if message.state == "dead":
        info = client.hget(partition.keys.dead_info, message.id)
        reason = str(read_info(info).get("reason", ""))
    return MessageDetails(
        message,
        headers,
        content_type,
        size,
        _in_line_since(partition, client, message, int(place["now_us"])),
        moment(number(place.get("since_us"))),
        reason,
    )


def _in_line_since(
    partition: Partition, client: Client, message: MessageSnapshot, now_us: int
) -> datetime | None:
    """Return when a waiting message was stored or due, from its score, as ``waiting_times.lua`` does."""
    if message.state != "waiting":
        return None
    keys = partition.keys
    score = client.zscore(keys.tenant(message.tenant), message.id)
    if score is None:
        single = client.hget(keys.single, message.tenant)
        score = SCORE.unpack_from(single)[0] if len(single or b"") > SCORE.size else now_us
    wait_us = now_us - score
    if wait_us >= STRICT_HEAD_START_US / 2:
        wait_us %= STRICT_HEAD_START_US
        # The message has a sequence time that is some µs ahead of the clock.
        wait_us = 0 if wait_us >= STRICT_HEAD_START_US / 2 else wait_us
    elif message.priority:
        wait_us -= message.priority * number(client.hget(keys.state, "head"))
    return moment(now_us - max(wait_us, 0))
