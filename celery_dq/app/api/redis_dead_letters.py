"""``app.dq.dead_letters`` of one queue in Redis: list dead letters, send them again, or delete them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kombu import serialization

from celery_dq.app.api.broker import BrokerAccess, OpenPartition
from celery_dq.context import AppContext
from celery_dq.errors import InvalidMessage
from celery_dq.inspector.dead_letters import DeadLetter, dead_ids, list_dead_letters
from celery_dq.inspector.redis_values import check_count, check_text
from celery_dq.transport import envelope
from celery_dq.transport.redis.store.partition import MAX_CHUNK
from celery_dq.transport.redis.store.record import RedisRecord
from celery_dq.transport.tenant import check_priority, check_tenant


class DeadLetters:
    """The dead letters of one queue."""

    def __init__(self, broker: BrokerAccess, context: AppContext, name: str) -> None:
        self.name = name
        self._broker = broker
        self._context = context

    def __len__(self) -> int:
        with self._broker.open(self.name) as (partition, client):
            return int(client.hlen(partition.keys.dead))

    def list(self, limit: int = 100, offset: int = 0) -> list[DeadLetter]:
        """List dead letters with reason, last worker and time, the latest first."""
        check_count("limit", limit)
        check_count("offset", offset, least=0)
        with self._broker.open(self.name) as (partition, client):
            return list_dead_letters(partition, client, limit, offset)

    def replay(self, message_id: str | None = None) -> int:
        """Send one dead letter, or all of them, to the end of the queue.

        The count of crash deliveries of a replayed message begins again at 0. Its ETA and expiry stay.

        Args:
            message_id: Which dead letter; all of them by default.

        Returns:
            How many messages were sent.
        """
        if message_id is not None:
            check_text("message_id", message_id)
        head_start = self._context.options.queue(self.name).head_start_us
        with self._broker.open(self.name) as opened:
            if message_id is not None:
                return int(self._replayed(opened, message_id, b"", head_start) is not None)
            count = 0
            # The limit is the present count, so that a message that dies again is not replayed twice.
            for message_id in dead_ids(*opened, limit=int(opened.client.hlen(opened.partition.keys.dead))):
                count += self._replayed(opened, message_id, b"", head_start) is not None
            return count

    def edit(self, message_id: str, **changes: Any) -> str | None:
        """Change a dead letter and send it again.

        Args:
            message_id: Which dead letter.
            changes: ``args``, ``kwargs`` (of the task), ``tenant``, ``priority``. A part that is not named
                stays.

        Returns:
            The new message id, None when there is no such dead letter.

        Raises:
            InvalidMessage: A change is unknown, or the message's body cannot be read.
        """
        check_text("message_id", message_id)
        check_changes(changes, ("args", "kwargs", "tenant", "priority"))
        head_start = self._context.options.queue(self.name).head_start_us
        with self._broker.open(self.name) as opened:
            raw = opened.client.hget(opened.partition.keys.dead, message_id)
            if raw is None:
                return None
            return self._replayed(
                opened, message_id, edited(RedisRecord.unpack(raw), **changes).pack(), head_start
            )

    def purge(self, message_id: str | None = None) -> int:
        """Delete one dead letter, or all of them, for good, and return the count of deleted ones."""
        if message_id is not None:
            check_text("message_id", message_id)
        with self._broker.open(self.name) as (partition, client):
            if message_id is not None:
                return partition.forget_dead([message_id]).run(client)
            count = 0
            while True:
                ids = dead_ids(partition, client, MAX_CHUNK)
                gone = partition.forget_dead(ids).run(client) if ids else 0
                count += gone
                if not gone:
                    return count

    @staticmethod
    def _replayed(opened: OpenPartition, message_id: str, record: bytes, head_start_us: int) -> str | None:
        return opened.partition.replay(message_id, record=record, head_start_us=head_start_us).run(
            opened.client
        )


def check_changes(changes: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise :exc:`~celery_dq.errors.InvalidMessage` for a change that cannot be made."""
    unknown = sorted(changes.keys() - {*known})
    if unknown:
        raise InvalidMessage(f"edit: {unknown[0]!r} cannot be changed: only {', '.join(known)}")


def edited(record: RedisRecord, **changes: Any) -> RedisRecord:
    """Return a record with other arguments, tenant or priority."""
    if "tenant" in changes:
        record = replace(record, tenant=check_tenant(changes["tenant"]))
    if "priority" in changes:
        record = replace(record, priority=check_priority(changes["priority"]))
    packed, body = readdressed(record.envelope, record.body, changes)
    return replace(record, envelope=packed, body=body)


def readdressed(packed: bytes, raw: str | bytes, changes: Mapping[str, Any]) -> tuple[bytes, str | bytes]:
    """Return envelope and body with other ``args`` or ``kwargs``."""
    if "args" not in changes and "kwargs" not in changes:
        return packed, raw
    headers, properties, content_type, encoding = envelope.unpack(packed)
    kind = content_type or "application/json"
    name = _serializer(kind)
    body: Any = serialization.loads(raw, kind, encoding or "utf-8", accept={kind})
    if not (isinstance(body, (list, tuple)) and len(body) == 3):
        raise InvalidMessage("edit: the message is no Celery task of protocol 2, its arguments are not known")
    args = list(changes["args"] if "args" in changes else body[0])
    kwargs = dict(changes["kwargs"] if "kwargs" in changes else body[1])
    kind, encoding, payload = serialization.dumps((args, kwargs, body[2]), name)
    headers = {**headers, "argsrepr": repr(tuple(args)), "kwargsrepr": repr(kwargs)}
    return envelope.pack(headers, properties, kind, encoding), payload


def _serializer(content_type: str) -> str:
    """Return kombu's name of the serializer for this content type."""
    registry: Any = serialization.registry  # type: ignore[attr-defined]  # not in kombu's stubs
    name = registry.type_to_name.get(content_type)
    if name is None:
        raise InvalidMessage(f"edit: no serializer is registered for content type {content_type!r}")
    return str(name)
