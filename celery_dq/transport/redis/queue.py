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
    """

    name: str
    partition: Partition
    max_deliveries: int = 5
    head_start_us: int = STRICT_PRIORITY_US

    @property
    def key(self) -> str:
        """Names the partition in the ledger: the prefix of its keys."""
        return self.partition.keys.prefix
