"""The message that a consumer receives."""

from __future__ import annotations

from typing import Any

from celery_dq.hooks import DELIVERIES
from celery_dq.transport import envelope
from celery_dq.transport.zookeeper.bases import KombuMessage
from celery_dq.transport.zookeeper.hand import Held
from celery_dq.transport.zookeeper.record import Record


class Message(KombuMessage):
    """A message taken from a queue, under a lock.

    Attributes:
        queue: name of the queue it was taken from.
        deliveries: how many workers were lost with it so far.
        discard: why it must not run (``dead:max_deliveries``), or ``""``.
        crashed: a requeue counts as a delivery, because a worker was lost.
    """

    def __init__(self, record: Record, held: Held, queue: str, channel: Any) -> None:
        tag = held.tag
        headers, properties, content_type, content_encoding = envelope.unpack(record.envelope)
        if record.due_ms:
            # It is due: with the header still there, the worker would put it into its timer.
            headers["eta"] = None
        info = properties.setdefault("delivery_info", {})
        info.setdefault("exchange", "")
        info.setdefault("routing_key", queue)
        info["priority"] = record.priority
        # What a retry has inherited, or somebody has forged: they are written anew at every delivery.
        headers.pop(DELIVERIES, None)
        if held.returned:
            info["redelivered"] = headers["redelivered"] = True
            info["deliveries"] = headers[DELIVERIES] = held.deliveries
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
        self.deliveries = held.deliveries
        self.discard = "dead:max_deliveries" if held.exhausted else ""
        self.crashed = False

    def ack(self, multiple: bool = False) -> None:
        """Acknowledge. A message that is discarded stays, as a dead letter, whoever says what."""
        if self.discard:
            self._state = "ACK"
        else:
            super().ack(multiple=multiple)
