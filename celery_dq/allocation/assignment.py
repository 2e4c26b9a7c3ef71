"""The whole assignment of partitions to workers, computed afresh from the members. Pure.

An assignment is a function of the members alone, not of an earlier assignment. So a mistake does not last,
and each allocator computes the same one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from celery_dq.allocation.ring import Unit, place
from celery_dq.errors import CorruptRecord

__all__ = ["Assignment", "RunningWorker", "compute", "pack", "partitions_of", "unpack"]

#: What a worker serves: numbers of partitions, by the name of the queue.
Served = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class RunningWorker:
    """One running worker.

    Attributes:
        name: Name of the worker.
        queues: The queues that it consumes and that are allocated, with their numbers of partitions.
        draining: Whether it gives its partitions away.
    """

    name: str
    queues: Mapping[str, int] = field(default_factory=dict)
    draining: bool = False


@dataclass(frozen=True)
class Assignment:
    """Which worker serves which partitions.

    Attributes:
        servers: The worker of each partition.
    """

    servers: Mapping[Unit, str] = field(default_factory=dict)

    def lists(self) -> dict[str, Served]:
        """Return the partitions of each worker."""
        found: dict[str, dict[str, list[int]]] = {}
        for (queue, number), worker in sorted(self.servers.items()):
            found.setdefault(worker, {}).setdefault(queue, []).append(number)
        return {
            worker: {queue: tuple(numbers) for queue, numbers in queues.items()}
            for worker, queues in found.items()
        }

    def moved(self, later: Assignment) -> int:
        """Return how many partitions have another worker in a later assignment."""
        return sum(later.servers.get(unit, worker) != worker for unit, worker in self.servers.items())

    def is_served(self, members: Iterable[RunningWorker]) -> bool:
        """Return whether each partition of these members has one of them that is to serve it."""
        return all(
            self.servers.get(unit) in eligible
            for queues, eligible in _groups(members).values()
            for unit in partitions_of(queues)
        )


def compute(members: Iterable[RunningWorker]) -> Assignment:
    """Assign each partition to one of the workers that consume its queue.

    Queues with the same workers are placed together, so that the bound holds for all of them at once. A
    draining worker gets partitions only if every worker of their queue drains.
    """
    servers: dict[Unit, str] = {}
    for queues, eligible in _groups(members).values():
        servers.update(place(partitions_of(queues), eligible))
    return Assignment(servers)


def partitions_of(queues: Mapping[str, int]) -> list[Unit]:
    """Return the partitions of queues with these numbers of partitions."""
    return [(queue, number) for queue, count in queues.items() for number in range(count)]


def _groups(members: Iterable[RunningWorker]) -> dict[tuple[str, ...], tuple[dict[str, int], frozenset[str]]]:
    """Return the queues with the same workers, and those of the workers that are to serve them."""
    counts: dict[str, int] = {}
    staying: dict[str, set[str]] = {}
    leaving: dict[str, set[str]] = {}
    for member in members:
        for queue, count in member.queues.items():
            # While the number changes, some workers know the former one.
            counts[queue] = max(count, counts.get(queue, 0))
            (leaving if member.draining else staying).setdefault(queue, set()).add(member.name)
    groups: dict[tuple[str, ...], tuple[dict[str, int], frozenset[str]]] = {}
    for queue, count in sorted(counts.items()):
        names = frozenset(staying.get(queue) or leaving[queue])
        groups.setdefault(tuple(sorted(names)), ({}, names))[0][queue] = count
    return groups


def pack(value: object) -> bytes:
    """Return a value of JSON in compressed form, as nodes hold it."""
    return zlib.compress(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())


def unpack(data: bytes) -> dict[str, object]:
    """Return the dict that :func:`pack` has packed.

    Raises:
        CorruptRecord: These are other data.
    """
    try:
        value = json.loads(zlib.decompress(data))
    except (zlib.error, ValueError) as error:
        raise CorruptRecord(
            f"the {len(data)} bytes of a node of the allocation are unreadable: {error}"
        ) from None
    if not isinstance(value, dict):
        raise CorruptRecord(f"a node of the allocation holds {type(value).__name__} instead of a dict")
    return value
