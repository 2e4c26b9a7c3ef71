"""The message that a consumer receives."""

from __future__ import annotations

from typing import Any

from celery_dq.transport import envelope
from celery_dq.transport.zookeeper.bases import KombuMessage
from celery_dq.transport.zookeeper.record import Record


class Message(KombuMessage):
    """A message taken from a queue, under a lock.

    Attributes:
        queue: name of the queue it was taken from.
    """

    def __init__(self, record: Record, tag: str, queue: str, returned: bool, channel: Any) -> None:
        headers, properties, content_type, content_encoding = envelope.unpack(record.envelope)
        if record.due_ms:
            # It is due: with the header still there, the worker would put it into its timer.
            headers["eta"] = None
        info = properties.setdefault("delivery_info", {})
        info.setdefault("exchange", "")
        info.setdefault("routing_key", queue)
        info["priority"] = record.priority
        if returned:
            info["redelivered"] = True
            headers["redelivered"] = True
        properties["priority"] = record.priority
        properties["delivery_tag"] = tag
        super().__init__(
            body=record.body,
            delivery_tag=tag,
            content_type=content_type,
            content_encoding=content_encoding,
            delivery_info=info,
            properties=properties,
            headers=headers,
            postencode="utf-8",
            channel=channel,
        )
        self.queue = queue
