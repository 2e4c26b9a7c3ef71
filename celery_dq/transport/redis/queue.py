"""A queue as the transport sees it: its partition, and how its messages are treated."""

from __future__ import annotations

from dataclasses import dataclass

from celery_dq.transport.redis.partition import STRICT_PRIORITY_US, Partition


@dataclass(frozen=True)
class Queue:
    """One consumed or published queue.

    Attributes:
        name: as ``-Q`` and kombu name it.
        partition: where its messages are.
        max_deliveries: crash deliveries after which a message is a dead letter; 0 = never.
        head_start_us: by how much one step of priority goes before its time, in µs.
        token: of the term in which this process leads the queue; 0 = nobody leads it.
    """

    name: str
    partition: Partition
    max_deliveries: int = 5
    head_start_us: int = STRICT_PRIORITY_US
    token: int = 0

    @property
    def key(self) -> str:
        """Names the partition in the ledger: the prefix of its keys, and the term if there is one."""
        return f"{self.partition.keys.prefix}@{self.token}" if self.token else self.partition.keys.prefix

    def consumer(self, process: str) -> str:
        """Return the name under which *process* consumes: the scripts look for the token in it."""
        return f"{process}@{self.token}" if self.token else process
