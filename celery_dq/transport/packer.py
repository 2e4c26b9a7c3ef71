"""Every message on its way into a queue is checked and packed here, whichever way it was published.

A direct call, a buffered one, a call from a template, a publish of kombu and a migration ask a
:class:`Packer`. A stamp is the producer id and a number. It stays in the properties of the message when kombu
publishes it again after a lost connection. A partition ignores a number that it has seen.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from celery_dq.clock import Clock
from celery_dq.errors import InvalidMessage
from celery_dq.options.sections import Options
from celery_dq.protocols import CONTINUES, COUNTDOWN, DEDUP_PROPERTY, DedupRequest
from celery_dq.transport import envelope
from celery_dq.transport.message_record import (
    KEYED,
    TEXT,
    MessageRecord,
    due_us,
    expires_us,
    pack_header,
    section_end,
)
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.tenant import check_priority, check_tenant

#: The property that carries the stamps of a message: queue → the producer's stamp.
STAMPS = "dq_stamps"
#: Properties that the transport sets at delivery, so that they are not stored.
_MADE_AT_DELIVERY = (
    "delivery_tag",
    "body_encoding",
    "priority",
    STAMPS,
    DEDUP_PROPERTY,
    COUNTDOWN,
    CONTINUES,
)


class PackedMessage(NamedTuple):
    """A message ready to be buffered, or stamped and pushed.

    Attributes:
        queue: Name of the target queue.
        id: Task id.
        record: Packed record.
        dedup: Receives the verdict on a call with a dedup key; None without a key.
    """

    queue: str
    id: str
    record: bytes
    dedup: DedupRequest | None = None


#: Makes a named tuple without a call of its own ``__new__``.
_packed = tuple.__new__


class StampedMessage(NamedTuple):
    """A message ready to be pushed.

    Attributes:
        queue: Name of the target queue.
        sequence: Producer id.
        outgoing: Number, task id and packed record.
        dedup: Receives the verdict on a call with a dedup key; None without a key.
        marker_ttl_ms: Lifetime of the producer's marker, in milliseconds.
    """

    queue: str
    sequence: str
    outgoing: OutgoingRecord
    dedup: DedupRequest | None
    marker_ttl_ms: int


class Packer:
    """Checks and packs the messages of an app or of a connection.

    Args:
        options: All settings, with the options of each queue.
        clock: Source of wall time, for relative expirations.

    Attributes:
        marker_ttl_ms: Lifetime of a producer's marker, in milliseconds.
    """

    def __init__(self, options: Options, clock: Clock) -> None:
        self.marker_ttl_ms = options.producer_marker_ttl_us // 1000
        self._clock = clock

    def pack(self, message: dict[str, Any], queue: str) -> PackedMessage:
        """Check a message, and build its record.

        Args:
            message: Message made by ``prepare_message`` of kombu.
            queue: Name of the target queue.

        Raises:
            InvalidMessage: The tenant, the priority or a time of the message is unusable. Nothing was sent.
        """
        headers, properties = message["headers"], message["properties"]
        task_id = headers.get("id") or properties.get("message_id") or ""
        if task_id and not (isinstance(task_id, str) and len(task_id.encode()) <= 200):
            raise InvalidMessage(
                f"task_id = {str(task_id)[:60]!r}… is not a text of at most 200 bytes: choose a shorter one, "
                "such as a digest of it"
            )
        tenant, task = check_tenant(properties.get("tenant", "")), headers.get("task") or ""
        now_us = int(self._clock.wall() * 1_000_000)
        request: DedupRequest | None = properties.get(DEDUP_PROPERTY)
        record = self.parts(message, queue)._replace(
            tenant=tenant,
            task=task if isinstance(task, str) else "",
            expires_us=expires_us(headers.get("expires"), properties.get("expiration"), now_us),
            dedup=b"" if request is None else request.section,
            counted=bool(properties.get(COUNTDOWN)),
            accepted=bool(headers.get("retries") or properties.get(CONTINUES)),
        )
        return PackedMessage(queue, task_id or uuid.uuid4().hex, record.pack(), request)

    def parts(self, message: dict[str, Any], queue: str, *, whole: bool = False) -> MessageRecord:
        """Check and build the parts of a record that all stores have.

        Args:
            message: As in :meth:`pack`.
            queue: Name of the target queue.
            whole: The envelope has the tenant and all of the address, because the store keeps neither.

        Raises:
            InvalidMessage: A header or property cannot be written as JSON, or priority or ETA are unusable.
        """
        headers, properties, body = message["headers"], message["properties"], message["body"]
        kept = {key: value for key, value in properties.items() if key not in _MADE_AT_DELIVERY}
        if not whole:
            kept.pop("tenant", None)
            _shorten_address(kept, queue)
        return MessageRecord(
            tenant="",
            task="",
            priority=check_priority(properties.get("priority")),
            due_us=due_us(headers.get("eta")),
            expires_us=0,
            envelope=envelope.pack(headers, kept, message["content-type"], message["content-encoding"]),
            body=body if isinstance(body, str) else bytes(body),
        )

    def fill(
        self,
        queue: str,
        task_id: str,
        tenant: bytes,
        task: bytes,
        priority: int,
        filled: str,
        body: str,
        request: DedupRequest | None,
    ) -> PackedMessage:
        """Build the record of a call from a template, without due time and expiry.

        Args:
            queue: Name of the target queue.
            task_id: Task id.
            tenant: As in :class:`MessageRecord`, encoded.
            task: As in :class:`MessageRecord`, encoded.
            priority: As in :class:`MessageRecord`.
            filled: Text of the envelope.
            body: Text of the body, in ASCII.
            request: The dedup request of the call.
        """
        flags, end = (TEXT, b"") if request is None else (TEXT | KEYED, section_end(request.section))
        content = (filled + body).encode("utf-8", "surrogatepass")
        header = pack_header(priority, flags, 0, 0, len(tenant), len(task), len(content) - len(body))
        record = b"".join((header, tenant, task, content, end))
        return _packed(PackedMessage, (queue, task_id, record, request))

    def stamp(
        self, message: dict[str, Any], queue: str, sequence: str, numbers: Iterator[int]
    ) -> StampedMessage:
        """Check and pack a message, and stamp it unless it was stamped before; raises as :meth:`pack`.

        Args:
            message: As in :meth:`pack`.
            queue: Name of the target queue.
            sequence: Producer id.
            numbers: Gives the producer's next number for this queue.
        """
        _, task_id, record, request = self.pack(message, queue)
        stamps = message["properties"].setdefault(STAMPS, {})
        known = stamps.get(queue)
        if known is None:
            known = stamps[queue] = (sequence, next(numbers), task_id, self.marker_ttl_ms)
        producer, place, first_id, marker_ttl_ms = known
        return StampedMessage(
            queue, producer, OutgoingRecord(place, first_id, record), request, marker_ttl_ms
        )


def _shorten_address(properties: dict[str, Any], queue: str) -> None:
    """Leave out what the queue says about the address of a message."""
    info = properties.get("delivery_info")
    if isinstance(info, dict):
        info = {key: value for key, value in info.items() if key != "redelivered"}
        if info.get("exchange") == "":
            del info["exchange"]
        if info.get("routing_key") == queue:
            del info["routing_key"]
        if info:
            properties["delivery_info"] = info
        else:
            del properties["delivery_info"]


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
