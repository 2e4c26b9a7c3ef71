"""The partitions that are allocated to this worker, of the queues that one channel consumes. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from celery_dq.protocols import PartitionAllocation
from celery_dq.transport.redis.store.partition_maps import PartitionMaps
from celery_dq.transport.redis.store.queue import PartitionedQueue, Queue


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
