"""The message that a consumer receives."""

from __future__ import annotations

from typing import Any

from celery_dq.transport.stored_message import StoredMessage
from celery_dq.transport.zookeeper.hand import Held
from celery_dq.transport.zookeeper.record import Record


class Message(StoredMessage):
    """A message taken from a queue, under a lock.

    Attributes:
        queue: name of the queue it was taken from.
        deliveries: how many workers were lost with it so far.
        discard: why it must not run (``dead:max_deliveries``), or ``""``.
        crashed: a requeue counts as a delivery, because a worker was lost.
    """

    def __init__(self, record: Record, held: Held, queue: str, channel: Any) -> None:
        super().__init__(
            record.envelope,
            record.body,
            priority=record.priority,
            due=bool(record.due_ms),
            returned=held.returned,
            deliveries=held.deliveries,
            tag=held.tag,
            queue=queue,
            channel=channel,
        )
        self.delivery_info["priority"] = record.priority
        self.discard = "dead:max_deliveries" if held.exhausted else ""
        self.crashed = False

    def ack(self, multiple: bool = False) -> None:
        """Acknowledge. A message that is discarded stays, as a dead letter, whoever says what."""
        if self.discard:
            self._state = "ACK"
        else:
            super().ack(multiple=multiple)
