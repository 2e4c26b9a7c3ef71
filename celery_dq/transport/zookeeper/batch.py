"""Kombu's ``Producer.batch()``: many messages in one transaction."""

from __future__ import annotations

from typing import Any, Protocol

from celery_dq.transport.zookeeper.publisher import Item, transactions


class BatchingChannel(Protocol):
    """The channel that publishes a batch."""

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        """Route a message, and add it to the batch that is passed as ``_publish_batch``."""

    def put(self, items: list[Item], stamps: dict[str, Any], key: str) -> None:
        """Publish the items in one transaction."""


class ZooKeeperPublishBatch:
    """Collects messages and publishes them together.

    Args:
        channel: The channel that publishes.
        max_size: Number of messages at which the batch flushes by itself.
    """

    def __init__(self, channel: BatchingChannel, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._waiting: list[Item] = []
        #: The messages of the transaction that was sent last, and its stamp until it was answered.
        self._piece: list[Item] = []
        self._stamps: dict[str, Any] = {}

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Check one message and add it to the batch."""
        return self.channel.basic_publish(message, _publish_batch=self, **kwargs)

    def add(self, item: Item) -> None:
        """Add an item; called by the channel after it has routed the message."""
        self._waiting.append(item)
        if len(self._waiting) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Publish the collected messages in order.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer. The unconfirmed messages stay in the batch, and a
                second flush creates nothing twice.
        """
        while self._waiting:
            if not self._stamps:
                self._piece = list(transactions(self._waiting)[0])
            # A repeat has the messages of the attempt without answer, and none that was added since.
            self.channel.put(self._piece, self._stamps, "batch")
            self._stamps.clear()
            del self._waiting[: len(self._piece)]

    def discard(self) -> None:
        """Drop the collected messages."""
        self._waiting.clear()
        self._stamps.clear()

    def close(self) -> None:
        """Do nothing: the connection belongs to the channel."""
