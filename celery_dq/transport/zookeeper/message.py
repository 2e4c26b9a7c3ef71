"""The message that a consumer receives."""

from __future__ import annotations

from typing import Any

from celery_dq.transport.stored_message import StoredMessage
from celery_dq.transport.zookeeper.record import Record


class Message(StoredMessage):
    """A message taken from a queue, under a lock.

    Attributes:
        queue: name of the queue it was taken from.
    """

    def __init__(self, record: Record, tag: str, queue: str, returned: bool, channel: Any) -> None:
        super().__init__(
            record.envelope,
            record.body,
            priority=record.priority,
            due=bool(record.due_ms),
            returned=returned,
            tag=tag,
            queue=queue,
            channel=channel,
        )
        self.delivery_info["priority"] = record.priority
