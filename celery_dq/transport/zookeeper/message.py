"""The message that a consumer receives."""

from __future__ import annotations

from typing import Any

from celery_dq.transport.stored_message import StoredMessage
from celery_dq.transport.zookeeper.in_flight import ClaimedItem
from celery_dq.transport.zookeeper.record import ZooKeeperRecord


class Message(StoredMessage):
    """A message taken from a queue, under a lock.

    Attributes:
        queue: Name of the queue from which the message was taken.
        deliveries: Number of deliveries so far that ended with the loss of the consumer.
        discard: Why the message must not run (``dead:max_deliveries``), or ``""``.
        crashed: Whether a requeue counts as a lost consumer.
        held: The item that this connection has locked.
    """

    def __init__(self, record: ZooKeeperRecord, held: ClaimedItem, queue: str, channel: Any) -> None:
        super().__init__(
            record.envelope,
            record.body,
            priority=record.priority,
            due_us=record.due_ms * 1000,
            returned=held.returned,
            deliveries=held.deliveries,
            tag=held.tag,
            queue=queue,
            channel=channel,
        )
        self.delivery_info["priority"] = record.priority
        self.held = held
        self.discard = "dead:max_deliveries" if held.exhausted else ""
        self.crashed = False

    def dead_letter(self, reason: str) -> None:
        """Move the message to the dead letters with *reason*; a later ack or reject has no effect."""
        self.channel.dead_letter(self, reason)

    def ack(self, multiple: bool = False) -> None:
        """Acknowledge the message. A message to be discarded stays in ZooKeeper as a dead letter."""
        if self.discard:
            self._state = "ACK"
        else:
            super().ack(multiple=multiple)
