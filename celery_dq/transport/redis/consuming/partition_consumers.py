"""The consumers of one channel: which of them consumes which partitions, and whose turn it is. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery_dq.transport.redis.store.queue import PartitionedQueue, Queue


@dataclass(eq=False)
class QueueConsumer:
    """One consumer.

    Attributes:
        tag: Its tag.
        queue: The consumed queue, or one partition of it.
        callback: Receives its messages.
        no_ack: Whether a message is over when it is delivered.
        partitions: The partitions that it consumes: those of the queue, those that are allocated to this
            worker, or none after its only one has gone.
    """

    tag: str
    queue: PartitionedQueue
    callback: Callable[[Any], Any]
    no_ack: bool
    partitions: tuple[Queue, ...] = ()


class PartitionConsumers:
    """The consumers of a channel. Those of one partition take turns."""

    def __init__(self) -> None:
        self._by_tag: dict[str, QueueConsumer] = {}
        #: The consumers of each partition, by the prefix of its keys.
        self._by_prefix: dict[str, deque[QueueConsumer]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_tag)

    @property
    def all(self) -> tuple[QueueConsumer, ...]:
        """All consumers."""
        return tuple(self._by_tag.values())

    def add(self, consumer: QueueConsumer, partitions: Sequence[Queue]) -> list[Queue]:
        """Add a consumer of these partitions; return those that had none before."""
        self._by_tag[consumer.tag] = consumer
        return self.assign(consumer, partitions)[0]

    def remove(self, tag: str) -> list[Queue]:
        """Remove a consumer; return the partitions that have none now."""
        consumer = self._by_tag.pop(tag, None)
        return [] if consumer is None else self.assign(consumer, ())[1]

    def assign(self, consumer: QueueConsumer, partitions: Sequence[Queue]) -> tuple[list[Queue], list[Queue]]:
        """Let a consumer consume these partitions and no other ones.

        Returns:
            The partitions that had no consumer before, and those that have none now.
        """
        before = {each.prefix: each for each in consumer.partitions}
        after = {each.prefix: each for each in partitions}
        consumer.partitions = tuple(partitions)
        begun, ended = [], []
        for prefix in after.keys() - before.keys():
            line = self._by_prefix.setdefault(prefix, deque())
            if not line:
                begun.append(after[prefix])
            line.append(consumer)
        for prefix in before.keys() - after.keys():
            line = self._by_prefix[prefix]
            line.remove(consumer)
            if not line:
                del self._by_prefix[prefix]
                ended.append(before[prefix])
        by_number = sorted(begun, key=lambda each: each.partition.keys.partition)
        return by_number, sorted(ended, key=lambda each: each.partition.keys.partition)

    def has(self, prefix: str) -> bool:
        """Return whether the partition with this prefix has a consumer."""
        return prefix in self._by_prefix

    def next_for(self, prefix: str) -> QueueConsumer:
        """Return the consumer of a partition whose turn it is."""
        line = self._by_prefix[prefix]
        line.rotate(-1)
        return line[-1]
