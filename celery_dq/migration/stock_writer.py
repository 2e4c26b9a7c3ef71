"""One message of a tenant broker, in the form in which kombu's Redis transport stores it."""

from __future__ import annotations

import base64
import uuid
from typing import Any

from kombu.utils.json import dumps

from celery_dq.errors import InvalidMessage, described
from celery_dq.migration.stock_message import Priorities
from celery_dq.protocols import DEDUP_HEADER, DELIVERIES_HEADER, QUEUE_HEADER, TOKEN_HEADER
from celery_dq.transport import envelope
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.stored_message import shown_eta

__all__ = ["as_stock_message"]


def as_stock_message(raw: bytes, queue: str, priorities: Priorities) -> tuple[int, str]:
    """Return the priority of a record on the stock broker, and its message as a list has it.

    Args:
        raw: The record.
        queue: The queue, which a stock worker finds by the default exchange.
        priorities: How priorities are converted.

    Raises:
        InvalidMessage: The record cannot be read, or written in that form.
    """
    try:
        record = MessageRecord.unpack(raw)
        headers, properties, content_type, content_encoding = envelope.unpack(record.envelope)
        for name in (TOKEN_HEADER, QUEUE_HEADER, DELIVERIES_HEADER):
            headers.pop(name, None)
        if record.due_us:
            # A reschedule has changed the due time only.
            headers["eta"] = shown_eta(headers.get("eta"), record.due_us)
        if record.dedup:
            headers[DEDUP_HEADER] = DedupSection.unpack(record.dedup).header()
        if record.tenant:
            properties["tenant"] = record.tenant
        priority = 9 - record.priority if priorities == "inverted" else record.priority
        properties["priority"] = priority
        info = properties.setdefault("delivery_info", {})
        info["exchange"], info["routing_key"] = "", queue
        properties["body_encoding"] = "base64"
        properties["delivery_tag"] = str(uuid.uuid4())
        body = record.body.encode("utf-8", "surrogatepass") if isinstance(record.body, str) else record.body
        message: dict[str, Any] = {
            "body": base64.b64encode(body).decode(),
            "content-encoding": content_encoding,
            "content-type": content_type,
            "headers": headers,
            "properties": properties,
        }
        return priority, dumps(message)
    except Exception as exc:
        raise InvalidMessage(f"it cannot be read: {described(exc)}") from exc
