"""Snapshots of single messages: the next ones of a queue or of tenants; place and details of one task."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, islice
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar

from celery_dq.errors import CorruptRecord
from celery_dq.inspector.redis_values import CHUNK, Client, chunks, first_of, moment, number, scan, text
from celery_dq.inspector.tenants import in_order_of_service
from celery_dq.keys import PartitionKeys
from celery_dq.options.sections import STRICT_HEAD_START_US
from celery_dq.transport import envelope
from celery_dq.transport.message_record import HEADER_SIZE, MessageRecord
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import Partition, process_of
from celery_dq.transport.redis.store.rounds import Rounds, run_chosen, run_rounds, together
from celery_dq.transport.redis.store.whole_queue import likely_first

#: The score of a message that is stored before its id: the only one of its tenant.
SCORE = struct.Struct(">d")


def waiting_of(
    keys: PartitionKeys, tenants: Sequence[str], limit: int
) -> Rounds[list[list[tuple[bytes, float]]]]:
    """Return up to `limit` message ids with their scores per tenant, in order, from both forms of storage."""
    if limit < 1:
        return [[] for _ in tenants]
    found: list[list[tuple[bytes, float]]] = []
    last = min(limit, CHUNK) - 1
    for chunk in chunks(tenants):
        # The single messages are read first: one may become the first of several meanwhile. Then it is read
        # twice instead of missed.
        singles, *sets = yield together(
            methodcaller("hmget", keys.single, chunk),
            *(methodcaller("zrange", keys.tenant(each), 0, last, withscores=True) for each in chunk),
        )
        for tenant, single, waiting in zip(chunk, singles, sets, strict=True):
            if single is not None and not waiting:
                waiting = [(single[SCORE.size :], SCORE.unpack_from(single)[0])]
            if limit > CHUNK == len(waiting):
                waiting = yield from first_of(keys.tenant(tenant), limit)
            found.append(waiting)
    return found


T = TypeVar("T")
#: The first word in the place of the arguments of a message that cannot be read.
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class MessageSnapshot:
    """A message in a queue.

    Attributes:
        id: The message id: the task id, with ``~1`` … when that id was taken.
        task_id: The id of the task, by which calls and commands find, cancel and change it.
        queue: Name of the queue.
        state: ``waiting``, ``delayed``, ``claimed`` (a consumer has it), ``settled`` (its task has started
            and is never delivered again), ``discarded`` (a worker has still to record that it will not run),
            ``dead``, or ``cancelled`` (cancelled, and not in the queue).
        task: Name of the task.
        tenant: Tenant of the message.
        priority: Priority, 0 to 9.
        due: When a delayed message is due; None for one without an ETA.
        expires: When the message expires; None for never.
        args: Celery's short representation of the positional arguments.
        kwargs: Celery's short representation of the named arguments.
        consumer: Consumer that has the message; "" unless claimed.
        deliveries: Number of deliveries so far that ended in a crash.
        partition: Number of its partition; 0 in a queue with one partition.
        resource: Resource that has taken a claimed message of a set; "" otherwise.
    """

    id: str
    task_id: str
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
    partition: int = 0
    resource: str = ""


def peek(
    partitions: Sequence[Partition], client: Client, limit: int = 10, tenant: str | None = None
) -> list[MessageSnapshot]:
    """Read the next waiting messages, roughly in order of service, without claiming them.

    Args:
        partitions: The partitions of the queue; with a tenant, those that concern it.
        client: A redis client.
        limit: Number of messages, at most.
        tenant: Only messages of this tenant, in order within each partition. Default: one message of each
            tenant in order of turn, those of throttled, limited and paused tenants last; then the second of
            each tenant, and so on.
    """
    if tenant is not None:
        tenants = [(partition, tenant) for partition in partitions]
    else:
        in_order = in_order_of_service(partitions, client, limit)
        tenants = [(partition, each.tenant) for partition, each in in_order]
    lines = _enough_of(client, tenants, limit)
    return _described_in_order(client, list(islice(_by_turns(lines), limit)), "waiting")


def _enough_of(
    client: Client, tenants: Sequence[tuple[Partition, str]], limit: int
) -> list[list[tuple[Partition, str]]]:
    """Return the waiting messages of each tenant, enough for `limit` messages taken in turns."""
    depth = -(-limit // max(len(tenants), 1))

    def line_of(partition: Partition, names: list[str]) -> Rounds[list[list[tuple[bytes, float]]]]:
        return waiting_of(partition.keys, names, depth)

    while True:
        lines = run_chosen(client, tenants, line_of)
        if sum(map(len, lines)) >= limit or all(len(line) < depth for line in lines):
            return [
                [(partition, text(each)) for each, _ in line]
                for (partition, _), line in zip(tenants, lines, strict=True)
            ]
        depth = min(depth * 2, limit)


def _by_turns(lists: Sequence[Sequence[T]]) -> Iterator[T]:
    for place in range(max(map(len, lists), default=0)):
        for each in lists:
            if place < len(each):
                yield each[place]


def peek_delayed(partitions: Sequence[Partition], client: Client, limit: int = 10) -> list[MessageSnapshot]:
    """Read the messages that wait for their ETA, the earliest first."""
    found = run_rounds(client, [first_of(each.keys.delayed, limit) for each in partitions])
    rows = [(due, text(each), number) for number, ids in enumerate(found) for each, due in ids]
    chosen = [(partitions[number], each) for _, each, number in sorted(rows)[:limit]]
    return _described_in_order(client, chosen, "delayed")


def _described_in_order(
    client: Client, chosen: Sequence[tuple[Partition, str]], state: str
) -> list[MessageSnapshot]:
    """Read the records of messages. Ids without a record are left out."""

    def described(partition: Partition, ids: list[str]) -> Rounds[list[MessageSnapshot | None]]:
        return _described(partition, ids, state)

    return [each for each in run_chosen(client, chosen, described) if each is not None]


def _described(partition: Partition, ids: list[str], state: str) -> Rounds[list[MessageSnapshot | None]]:
    keys = partition.keys
    found: list[MessageSnapshot | None] = []
    for chunk in chunks(ids):
        records, deliveries = yield together(
            methodcaller("hmget", keys.messages, chunk), methodcaller("hmget", keys.deliveries, chunk)
        )
        found += [
            None
            if raw is None
            else replace(_message_in(partition, raw, message_id, state), deliveries=int(number(count)))
            for message_id, raw, count in zip(chunk, records, deliveries, strict=True)
        ]
    return found


def find(partitions: Sequence[Partition], client: Client, task_id: str) -> list[MessageSnapshot]:
    """Return the messages of a task, at most one for each queue that has it.

    A dead letter is returned only if no other message of the task is in the queue, and a tombstone only if
    nothing else is.

    Args:
        partitions: The partitions of one queue or of several.
        client: A redis client.
        task_id: The id of the task.
    """
    return [each.message for each in find_located(partitions, client, task_id)]


def find_located(partitions: Sequence[Partition], client: Client, task_id: str) -> list[Located]:
    """Return the messages of :func:`find` with their records.

    The partitions in which the id says that the task is are asked first. The other ones are asked only if
    none of them has it. A dead letter or a tombstone is no such answer.
    """
    first, others = likely_first(partitions, task_id)
    answers = _located_in(first, client, task_id)
    if all(each is None or each.message.state in _LAST for each in answers.values()):
        answers |= _located_in(others, client, task_id)
    found: dict[str, Located] = {}
    for partition in partitions:
        each = answers.get(partition)
        if each is not None:
            known = found.setdefault(each.message.queue, each).message
            if _LAST.get(each.message.state, 0) < _LAST.get(known.state, 0):
                found[each.message.queue] = each
    return list(found.values())


def _located_in(
    partitions: Sequence[Partition], client: Client, task_id: str
) -> dict[Partition, Located | None]:
    found = run_rounds(client, [locate(partition, task_id) for partition in partitions])
    return dict(zip(partitions, found, strict=True))


#: The states that count only where a task is in no other one.
_LAST = {"dead": 1, "cancelled": 2}


class Located(NamedTuple):
    """A message that was found by its task id.

    Attributes:
        message: The snapshot of the message.
        place: The reply of the script ``locate``.
        record: The stored record; empty without one.
    """

    message: MessageSnapshot
    place: Mapping[str, str]
    record: bytes


def locate(partition: Partition, task_id: str) -> Rounds[Located | None]:
    """Find the message of a task in one partition."""
    place = yield partition.locate(task_id)
    if not place:
        return None
    message_id, state = place["id"], place["state"]
    keys = partition.keys
    (raw,) = yield lambda pipe: pipe.hget(keys.dead if state == "dead" else keys.messages, message_id)
    message = _message_in(partition, raw or b"", message_id, state)
    message = replace(
        message,
        tenant=message.tenant or place.get("tenant", ""),
        consumer=process_of(place.get("consumer", "")),
        deliveries=int(number(place.get("deliveries"))),
        resource=place.get("resource", ""),
    )
    return Located(message, place, raw or b"")


def _message_in(partition: Partition, raw: bytes, message_id: str, state: str) -> MessageSnapshot:
    keys = partition.keys
    return replace(message_of(raw, message_id, keys.queue, state), partition=keys.partition)


def message_of(raw: bytes, message_id: str, queue: str, state: str) -> MessageSnapshot:
    """Read a record, as far as it can be read. Of the marker of a settled one, only the id is known."""
    message = MessageSnapshot(message_id, task_id_of(message_id), queue, state)
    if len(raw) < HEADER_SIZE:
        return message
    try:
        record = MessageRecord.unpack(raw)
        message = replace(
            message,
            task=record.task,
            tenant=record.tenant,
            priority=record.priority,
            due=moment(record.due_us),
            expires=moment(record.expires_us),
        )
        headers: dict[str, Any] = envelope.unpack(record.envelope)[0]
    except CorruptRecord as exc:
        return replace(message, args=f"{UNREADABLE}: {exc}")
    return replace(
        message,
        args=str(headers.get("argsrepr") or ""),
        kwargs=str(headers.get("kwargsrepr") or ""),
    )


def read_info(info: bytes | None) -> dict[str, Any]:
    """Return the description of the end of a dead letter; only a reason if it cannot be read."""
    try:
        known: dict[str, Any] = json.loads(info) if info else {}
        return {**known, "deliveries": int(known.get("deliveries", 0))}
    except Exception:  # another program may have written anything
        return {"reason": "unreadable", "deliveries": 0}


def ids_of_task(partition: Partition, client: Client, task: str) -> Iterator[list[str]]:
    """Yield, in chunks, the task ids of all messages of one task name."""
    for chunk in scan(client, "hash", partition.keys.messages):
        yield [task_id_of(text(message_id)) for message_id, raw in chunk if _heading(raw)[1] == task]


def cancellable_of_task(partition: Partition, client: Client, task: str) -> int:
    """Count the messages of one task name that no worker has and that are not discarded yet."""
    keys, found = partition.keys, 0
    for chunk in scan(client, "hash", keys.messages):
        ids = [message_id for message_id, raw in chunk if _heading(raw)[1] == task]
        if not ids:
            continue
        pipeline = client.pipeline(transaction=False)
        pipeline.zmscore(keys.discards, ids)
        for consumer in client.zrange(keys.leases, 0, -1):
            pipeline.hmget(keys.held(text(consumer)), ids)
        elsewhere = pipeline.execute()
        found += sum(all(place is None for place in places) for places in zip(*elsewhere, strict=True))
    return found


def unlisted_ids_of_tenant(partition: Partition, client: Client, tenant: str) -> Iterator[list[str]]:
    """Yield, in chunks, the task ids of a tenant's messages that its own list does not hold.

    They are behind the lock of a dedup key, delayed, or wait for the result of another message. One that
    changes its place meanwhile goes to a place that is read later, or to the tenant's own list.
    """
    keys = partition.keys
    places = (scan(client, "zset", keys.blocked), scan(client, "zset", keys.delayed))
    for chunk in chain(*places, scan(client, "hash", keys.following)):
        ids = [text(message_id) for message_id, _ in chunk]
        records = client.hmget(keys.messages, ids) if ids else []
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
        record = MessageRecord.unpack(raw)
    except CorruptRecord:
        return None, None
    return record.tenant, record.task


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
