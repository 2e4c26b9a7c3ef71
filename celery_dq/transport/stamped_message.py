"""A message on its way into a partition: checked, packed, and stamped by its publisher.

The stamp is the producer id and a number. It stays in the properties of the message when kombu publishes it
again after a lost connection. A partition ignores a number that it has seen.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from celery_dq.errors import InvalidMessage
from celery_dq.protocols import COUNTDOWN, DEDUP_PROPERTY, DedupRequest
from celery_dq.transport import envelope
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.message_times import due_us, expires_us
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.tenant import check_priority, check_tenant

#: The property that carries the stamps of a message: queue → (producer id, number, task id). An optional
#: fourth item is the lifetime of the producer's marker, in milliseconds.
STAMPS = "dq_stamps"
#: Properties that the transport sets at delivery, so that they are not stored.
_MADE_AT_DELIVERY = ("delivery_tag", "body_encoding", "priority", "tenant", STAMPS, DEDUP_PROPERTY, COUNTDOWN)


class StampedMessage(NamedTuple):
    """A message ready to be pushed.

    Attributes:
        sequence: Producer id.
        outgoing: Number, task id and packed record.
        dedup: Receives the verdict on a call with a dedup key; None without a key.
        marker_ttl_ms: Lifetime of the producer's marker, in milliseconds; None for the setting.
    """

    sequence: str
    outgoing: OutgoingRecord
    dedup: DedupRequest | None = None
    marker_ttl_ms: int | None = None


def stamp(
    message: dict[str, Any], queue: str, sequence: str, number: Callable[[], int], now_us: int
) -> StampedMessage:
    """Check *message*, build its record, and stamp it unless it was stamped before.

    Args:
        message: Message made by ``prepare_message`` of kombu.
        queue: Name of the target queue.
        sequence: Producer id.
        number: Returns the producer's next number for this queue.
        now_us: Wall time in microseconds, for a relative expiration.

    Returns:
        The stamped message.

    Raises:
        InvalidMessage: The tenant, the priority or a time of the message is unusable. Nothing was sent.
    """
    headers, properties = message["headers"], message["properties"]
    body = message["body"]
    if not isinstance(body, str):
        body = bytes(body)
    task_id = headers.get("id") or properties.get("message_id") or ""
    if task_id and not (isinstance(task_id, str) and len(task_id.encode()) <= 200):
        raise InvalidMessage(
            f"task_id = {str(task_id)[:60]!r}… is not a text of at most 200 bytes: choose a shorter one, "
            "such as a digest of it"
        )
    task = headers.get("task") or ""
    request: DedupRequest | None = properties.get(DEDUP_PROPERTY)
    record = MessageRecord(
        tenant=check_tenant(properties.get("tenant", "")),
        task=task if isinstance(task, str) else "",
        priority=check_priority(properties.get("priority")),
        due_us=due_us(headers.get("eta")),
        expires_us=expires_us(headers.get("expires"), properties.get("expiration"), now_us),
        envelope=_envelope(message, headers, properties, queue),
        body=body,
        dedup=request.section if request is not None else b"",
        counted=bool(properties.get(COUNTDOWN)),
    )
    stamps = properties.setdefault(STAMPS, {})
    known = stamps.get(queue)
    if known is None:
        known = stamps[queue] = (sequence, number(), task_id or uuid.uuid4().hex)
    marker_ttl_ms = known[3] if len(known) > 3 else None
    return StampedMessage(known[0], OutgoingRecord(known[1], known[2], record.pack()), request, marker_ttl_ms)


def _envelope(
    message: dict[str, Any], headers: dict[str, Any], properties: dict[str, Any], queue: str
) -> bytes:
    kept = {key: value for key, value in properties.items() if key not in _MADE_AT_DELIVERY}
    info = kept.get("delivery_info")
    if isinstance(info, dict):
        info = {key: value for key, value in info.items() if key != "redelivered"}
        if info.get("exchange") == "":
            del info["exchange"]
        if info.get("routing_key") == queue:
            del info["routing_key"]
        if info:
            kept["delivery_info"] = info
        else:
            del kept["delivery_info"]
    return envelope.pack(headers, kept, message["content-type"], message["content-encoding"])


class PublishBatch:
    """The batch of ``Producer.batch()`` of kombu.

    Args:
        channel: The channel that publishes.
        max_size: Number of messages at which the batch flushes by itself.
    """

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._waiting: list[Any] = []

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Add one message to the batch; it is checked now and sent with the others."""
        return self.channel.basic_publish(message, _publish_batch=self, **kwargs)

    def add(self, item: Any) -> None:
        """Add an item; called by the channel for each queue that the message is routed to."""
        self._waiting.append(item)
        if len(self._waiting) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Publish the collected messages in order."""
        raise NotImplementedError

    def discard(self) -> None:
        """Drop the messages that are not yet sent."""
        self._waiting.clear()

    def close(self) -> None:
        """Do nothing, because the connection belongs to the channel."""
