"""Kombu's ``Producer.batch()``: many messages in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dq.transport.zookeeper.publisher import Item, transactions

if TYPE_CHECKING:
    from celery_dq.transport.zookeeper.channel import Channel


class PublishBatch:
    """Gathers messages.

    Arguments:
        channel: the channel that publishes.
        max_size: messages after which it flushes by itself.
    """

    def __init__(self, channel: Channel, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._waiting: list[Item] = []
        self._stamps: dict[str, Any] = {}

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Accept one message: it is checked now and sent with the others."""
        return self.channel.basic_publish(message, _publish_batch=self, **kwargs)

    def add(self, item: Item) -> None:
        """Called by the channel once it knows where the message goes."""
        self._waiting.append(item)
        if len(self._waiting) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Send what waits, in order.

        Raises:
            ZooKeeperUnreachable: What was not answered stays here; flushing again creates nothing twice.
        """
        while self._waiting:
            piece = list(transactions(self._waiting)[0])
            self.channel.put(piece, self._stamps, "batch")
            self._stamps.clear()
            del self._waiting[: len(piece)]

    def discard(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self._stamps.clear()

    def close(self) -> None:
        """Nothing to give back: the connection is the channel's."""
