"""A message as it lies in a node.

One item in Curator's framing, so that Java peers can carry it. The item, big-endian::

    B version   B priority   B flags   q due ms   I len(envelope)   envelope   body

``due`` is 0 for a message that may be served at once. Flag 1 says that the body is text.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery_dq.curator.framing import frame, unframe
from celery_dq.errors import CorruptRecord, InvalidMessage
from celery_dq.transport import envelope
from celery_dq.transport.tenant import check_priority

VERSION = 1
TEXT = 1
_HEADER = struct.Struct(">BBBqI")
#: Bytes of data that one transaction carries at most; the rest of what ZooKeeper takes is for paths.
BATCH_BYTES = 900_000
#: Properties that the transport makes anew at delivery.
_MADE_AT_DELIVERY = ("delivery_tag", "body_encoding", "priority")


@dataclass(frozen=True)
class Record:
    """One stored message, taken apart.

    Attributes:
        priority: 0 to 9, higher is more urgent.
        due_ms: when it may be served, milliseconds since the epoch; 0 = at once.
        envelope: headers and properties, see :mod:`celery_dq.transport.envelope`.
        body: the serialised body; ``str`` when the serializer made text.
    """

    priority: int
    due_ms: int
    envelope: bytes
    body: str | bytes

    def pack(self) -> bytes:
        """The bytes of a node."""
        body, flags = self.body, 0
        if isinstance(body, str):
            body, flags = body.encode("utf-8", "surrogatepass"), TEXT
        head = _HEADER.pack(VERSION, self.priority, flags, self.due_ms, len(self.envelope))
        return frame([b"".join((head, self.envelope, body))])

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        """Take the bytes of a node apart.

        Raises:
            CorruptRecord: They are none that :meth:`pack` made.
        """
        try:
            items = unframe(data)
            if len(items) != 1:
                raise CorruptRecord(f"a stored message is one item, and there are {len(items)} in its node")
            (item,) = items
            version, priority, flags, due_ms, length = _HEADER.unpack_from(item)
            if version != VERSION:
                raise CorruptRecord(f"a stored message has layout version {version}, known is {VERSION}")
            start = _HEADER.size
            if start + length > len(item):
                raise CorruptRecord("the envelope of a stored message reaches beyond its end")
            body: str | bytes = item[start + length :]
            if flags & TEXT:
                body = item[start + length :].decode("utf-8", "surrogatepass")
            return cls(priority, due_ms, item[start : start + length], body)
        except (struct.error, UnicodeDecodeError) as exc:
            raise CorruptRecord(f"a stored message cannot be read: {exc}") from exc


def record_of(message: dict[str, Any]) -> Record:
    """The record of what kombu's ``prepare_message`` made.

    Raises:
        InvalidMessage: A header or property cannot be written as JSON, or priority or ETA are unusable.
    """
    headers, properties = message["headers"], message["properties"]
    body = message["body"]
    kept = {key: value for key, value in properties.items() if key not in _MADE_AT_DELIVERY}
    kept.pop(STAMPS, None)
    try:
        packed = envelope.pack(headers, kept, message["content-type"], message["content-encoding"])
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidMessage(f"a header or property cannot be written as JSON: {exc}") from exc
    return Record(
        check_priority(properties.get("priority")),
        _due_ms(headers.get("eta")),
        packed,
        body if isinstance(body, str) else bytes(body),
    )


#: The property that carries the stamps of a message: queue → (node of the producer, its version).
STAMPS = "dq_stamps"


def _due_ms(eta: Any) -> int:
    if eta is None:
        return 0
    try:
        moment = eta
        if isinstance(moment, str):
            moment = datetime.fromisoformat(eta[:-1] + "+00:00" if eta.endswith("Z") else eta)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        # Up, not down: a task must not start before its time.
        return max(-int(-moment.timestamp() * 1000 // 1), 0)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise InvalidMessage(f"eta = {eta!r} is not a time: give a datetime or an ISO 8601 text") from None
