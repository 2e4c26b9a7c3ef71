"""Which partitions a channel consumes, and which of its consumers each one has in turn. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery_dq.protocols import PartitionAllocation
from celery_dq.transport.redis.store.partition_map import PartitionMaps
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
    def partition_count(self) -> int:
        """How many partitions are consumed."""
        return len(self._by_prefix)

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


class AllocatedPartitions:
    """Which partitions of its queues a channel consumes.

    Args:
        allocation: The partitions that this worker serves.
        maps: The maps of the queues, as the process knows them.
    """

    def __init__(self, allocation: PartitionAllocation, maps: PartitionMaps) -> None:
        self.allocation = allocation
        self._maps = maps
        self._seen = self._doubted = allocation.version

    def report(self, queue: PartitionedQueue) -> None:
        """Report a consumed queue and its number of partitions; a pinned partition is not allocated."""
        if not queue.is_pinned:
            self.allocation.consumes(queue.name, len(queue.partitions))

    @property
    def differs(self) -> bool:
        """Whether the allocation has changed since the last call of :meth:`has_changed`."""
        return self._seen != self.allocation.version

    def has_changed(self) -> bool:
        """Return whether the allocation has changed since the last call."""
        former, self._seen = self._seen, self.allocation.version
        return former != self._seen

    def of(self, queue: PartitionedQueue) -> Sequence[Queue]:
        """Return the partitions of a queue to consume."""
        served = self.allocation.served(queue.name)
        if served is None:
            return queue.partitions
        if max(served, default=0) >= len(queue.partitions) and self._doubted != self.allocation.version:
            # Other workers know more partitions. Without a lease, no heartbeat brings their number.
            self._doubted = self.allocation.version
            self._maps.doubt(queue.whole_name)
        return [each for number, each in enumerate(queue.partitions) if number in served]
