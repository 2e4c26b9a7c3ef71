"""A queue of the transport: its partition, and the options for its messages."""

from __future__ import annotations

from dataclasses import dataclass

from celery_dq.transport.redis.store.partition import STRICT_PRIORITY_US, Partition


@dataclass(frozen=True)
class Queue:
    """One consumed or published queue.

    Attributes:
        name: the name that ``-Q`` and kombu use.
        partition: the partition with its messages.
        max_deliveries: deliveries with a crash after which a message is a dead letter; 0 = never.
        head_start_us: µs by which one step of priority goes before its time.
        token: fencing token of the term in which this process leads the queue; 0 without a leader.
    """

    name: str
    partition: Partition
    max_deliveries: int = 5
    head_start_us: int = STRICT_PRIORITY_US
    token: int = 0

    @property
    def key(self) -> str:
        """Name of the partition in this process: the prefix of its keys, and the fencing token if any."""
        return f"{self.partition.keys.prefix}@{self.token}" if self.token else self.partition.keys.prefix

    def consumer(self, process: str) -> str:
        """Return the name under which *process* consumes; the scripts read the fencing token from it."""
        return f"{process}@{self.token}" if self.token else process
