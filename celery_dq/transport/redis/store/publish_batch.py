"""Publishes many messages together, for ``Producer.batch()`` of kombu."""

from __future__ import annotations

import logging
from typing import Any

from celery_dq.compat.kombu_publishing import library_errors
from celery_dq.transport.stamped_message import StampedMessage

logger = logging.getLogger(__name__)

#: Maximum number of attempts to send a batch.
BATCH_ATTEMPTS = 4


class RedisPublishBatch:
    """The batch of ``Producer.batch()`` of kombu: one push for many messages of a queue.

    Args:
        channel: The channel that publishes.
        max_size: Number of messages after which the batch is flushed.
    """

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._waiting: list[tuple[str, StampedMessage]] = []

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Add one message to the batch; it is checked now and sent with the others."""
        return self.channel.basic_publish(message, _publish_batch=self, **kwargs)

    def add(self, queue: str, stamped: StampedMessage) -> None:
        """Add a stamped message; called by the channel for each queue that the message is routed to."""
        self._waiting.append((queue, stamped))
        if len(self._waiting) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Send all messages in order, in one push per run of messages of one queue and producer.

        Raises:
            OperationalError: Unanswered messages stay in the batch; flushing again is safe.
        """
        with library_errors(self.channel.connection.client):
            while self._waiting:
                queue, first = self._waiting[0]
                run = 1
                while (
                    run < len(self._waiting)
                    and run < 1000
                    and self._waiting[run][0] == queue
                    and self._waiting[run][1].sequence == first.sequence
                ):
                    run += 1
                self._push(queue, [stamped for _, stamped in self._waiting[:run]])
                del self._waiting[:run]

    def _push(self, queue: str, messages: list[StampedMessage]) -> None:
        # Kombu can retry a publish, but not a batch, which it discards when it opens a new channel.
        if not any(self._answered(queue, messages) for _ in range(BATCH_ATTEMPTS - 1)):
            self.channel.publisher.push(queue, messages)

    def _answered(self, queue: str, messages: list[StampedMessage]) -> bool:
        try:
            self.channel.publisher.push(queue, messages)
        except self.channel.connection_errors as exc:
            logger.info(
                "A batch of %d messages for queue %s was not answered (%s); it is sent again.",
                len(messages),
                queue,
                exc,
                extra={"event": "batch_sent_again", "queue": queue},
            )
            return False
        return True

    def discard(self) -> None:
        """Discard the messages that are not yet sent."""
        self._waiting.clear()

    def close(self) -> None:
        """Do nothing, because the connection belongs to the channel."""
