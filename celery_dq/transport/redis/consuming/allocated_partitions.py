"""The partitions that are allocated to this worker, of the queues that one channel consumes. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from celery_dq.protocols import PartitionAllocation
from celery_dq.transport.redis.store.queue import PartitionedQueue, Queue


class AllocatedPartitions:
    """Changes the consumers of a channel with the allocation.

    Args:
        allocation: The partitions that this worker serves.
        consume_exactly: Called with the tag of a consumer and the partitions that it is to consume.
    """

    def __init__(
        self,
        allocation: PartitionAllocation,
        consume_exactly: Callable[[str, Sequence[Queue]], None],
    ) -> None:
        self.allocation = allocation
        self._consume_exactly = consume_exactly
        self._queues: dict[str, PartitionedQueue] = {}
        self._version = allocation.version

    def start(self, tag: str, queue: PartitionedQueue) -> None:
        """Let a consumer consume the allocated partitions of a queue, or the pinned one."""
        self._queues[tag] = queue
        if not queue.is_pinned:
            self.allocation.consumes(queue.name, queue.count)
        self._consume_exactly(tag, self._served(queue))

    def stop(self, tag: str) -> None:
        """Forget a consumer."""
        self._queues.pop(tag, None)

    def follow(self) -> None:
        """Change the consumers if the allocation has changed."""
        version = self.allocation.version
        if version != self._version:
            self._version = version
            for tag, queue in tuple(self._queues.items()):
                self._consume_exactly(tag, self._served(queue))

    def _served(self, queue: PartitionedQueue) -> Sequence[Queue]:
        served = self.allocation.served(queue.name)
        if served is None:
            return queue.partitions
        return [each for number, each in enumerate(queue.partitions) if number in served]
