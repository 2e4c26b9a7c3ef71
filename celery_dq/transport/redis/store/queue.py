"""The queues of the transport: their partitions, and the options for their messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from celery_dq.errors import InvalidMessage
from celery_dq.transport.redis.store.partition import STRICT_PRIORITY_US, Partition
from celery_dq.transport.redis.store.replies import read_text

#: The end of a consumer's name after its process: a fencing token, and the mark of a lost one.
_PART = re.compile(r"(@\d+)?(~lost~\d+)?\Z")


def process_of(consumer: str) -> str:
    """Return the process of a consumer by the name that :meth:`Queue.consumer` has made."""
    return _PART.sub("", consumer, count=1)


@dataclass(frozen=True)
class Queue:
    """One partition of a consumed or published queue. Most queues have one partition.

    Attributes:
        name: the name that ``-Q`` and kombu use for the whole queue.
        partition: the partition with its messages.
        max_deliveries: deliveries with a crash after which a message is a dead letter; 0 = never.
        head_start_us: µs by which one step of priority goes before its time.
        retention: for how many ms a dead letter is kept, and how many dead letters are; 0 means no bound.
        token: fencing token of the term in which this process leads the queue; 0 without a leader.
    """

    name: str
    partition: Partition
    max_deliveries: int = 5
    head_start_us: int = STRICT_PRIORITY_US
    retention: tuple[int, int] = (0, 0)
    token: int = 0

    @cached_property
    def prefix(self) -> str:
        """Prefix of the keys, which stays when the number of partitions or the leader changes."""
        return self.partition.keys.prefix

    @cached_property
    def key(self) -> str:
        """Name of the partition in this process: the prefix of its keys, and the fencing token if any."""
        return f"{self.prefix}@{self.token}" if self.token else self.prefix

    @property
    def partition_name(self) -> str:
        """The name under which a worker consumes this partition alone: ``push/3``; ``push`` if it is all."""
        return self.partition.name

    def consumer(self, process: str) -> str:
        """Return the name under which *process* consumes; the scripts read the fencing token from it."""
        return f"{process}@{self.token}" if self.token else process


class PartitionedQueue:
    """A queue with all of its partitions, or one partition that a worker consumes alone.

    Args:
        name: The name that ``-Q`` and kombu use.
        partitions: The partitions, in the order of their numbers, during a change also those that go; of a
            pinned one, that one.

    Attributes:
        name: As above.
        partitions: As above.
        whole_name: The name of the whole queue.
        homes: The map of the whole queue.
        count: Number of partitions that the whole queue has or gets.
        is_pinned: Whether this is one partition of several, named as ``push/3``.
    """

    def __init__(self, name: str, partitions: Sequence[Queue]) -> None:
        self.name = name
        self.partitions = tuple(partitions)
        self.whole_name = self.partitions[0].name
        self.homes = self.partitions[0].partition.homes
        self.count = self.homes.count
        self.is_pinned = len(self.partitions) < self.homes.total

    def part_of(self, whole: PartitionedQueue) -> PartitionedQueue | None:
        """Return the same part of the queue as it is now; None for one partition that has gone.

        Args:
            whole: The whole queue with its present partitions.
        """
        if not self.is_pinned:
            return whole
        number = self.partitions[0].partition.keys.partition
        # Where a queue has one partition, push/0 is the name of another queue.
        if not number < whole.homes.total > 1:
            return None
        return PartitionedQueue(self.name, [whole.partitions[number]])

    def home(self, tenant: str) -> Queue:
        """Return the partition in which *tenant* lives; of a spread tenant, that of its first share.

        Raises:
            InvalidMessage: As for :meth:`route`.
        """
        self._require_all()
        return self.partitions[self.homes.home(tenant)]

    def route(self, record: bytes, task_id: str | bytes) -> tuple[Queue, bool]:
        """Return the partition for a message, and whether its tenant waits there: `PartitionMap.route`.

        The task ids of buffered messages are encoded.

        Raises:
            InvalidMessage: This is one partition of a queue; a message has its place by its tenant.
            InvalidTenant: The tenant is a set of resources, and the queue has several partitions.
        """
        self._require_all()
        number, moving = self.homes.route(self.name, record, read_text(task_id))
        return self.partitions[number], moving

    def _require_all(self) -> None:
        if self.is_pinned:
            raise InvalidMessage(
                f"queue = {self.name!r} is one partition of queue {self.whole_name!r}, and the tenant of a "
                f"message decides its partition: send it to {self.whole_name!r}"
            )
