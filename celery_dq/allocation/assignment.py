"""The whole assignment of partitions to workers, computed afresh from the members. Pure.

An assignment is a function of the members alone, not of an earlier assignment. So a mistake does not last,
and each allocator computes the same one.
"""

from __future__ import annotations

import json
import math
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from celery_dq.errors import CorruptRecord

#: A queue and the number of one of its partitions.
Unit = tuple[str, int]

#: Points of a worker on the ring.
POINTS = 1000
#: Largest load of a worker, as a multiple of the mean.
BOUND = 1.05
#: 2⁶⁴ divided by the golden ratio.
_STEP = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1
#: Points that one digest gives.
_PER_DIGEST = 8
#: What a worker serves: numbers of partitions, by the name of the queue.
Served = dict[str, tuple[int, ...]]


def bound(units: int, workers: int) -> int:
    """Return the largest number of partitions that one of *workers* gets of *units*."""
    # In whole numbers: 1.05 as a binary fraction is a little too large, and would raise whole results by one.
    return -(-units * round(BOUND * 100) // (100 * workers))


def place(units: Iterable[Unit], workers: Iterable[str]) -> dict[Unit, str]:
    """Return the worker of each partition. The result does not depend on the order of the arguments.

    This is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018, arXiv:1608.01350).
    Each worker has 1,000 points on a ring of 2⁶⁴ positions. A partition belongs to the next point clockwise
    whose worker is not full. A worker is full at ``ceil(1.05 × mean)`` partitions.

    The partitions of one queue lie at equal distances, by the golden ratio, and not at random. So the loads
    differ less, fewer workers are full, and fewer partitions move when a worker comes or goes. The position
    of a partition does not depend on the number of partitions.

    Args:
        units: The partitions.
        workers: The names of the workers.

    Raises:
        ValueError: There are partitions and no worker.
    """
    starts: dict[str, int] = {}
    line = []
    for queue, number in dict.fromkeys(units):
        if queue not in starts:
            (starts[queue],) = _numbers(queue, 8)
        line.append(((starts[queue] + number * _STEP) & _MASK, queue, number))
    if not line:
        return {}
    names = sorted(set(workers))
    if not names:
        raise ValueError(f"there are {len(line)} partitions and no worker to place them on")
    ring = sorted((point, name) for name in names for point in _points(name))
    points = [point for point, _ in ring]
    room = dict.fromkeys(names, bound(len(line), len(names)))
    placed: dict[Unit, str] = {}
    line.sort()
    for position, queue, number in line:
        at = bisect_left(points, position) % len(ring)
        while not room[ring[at][1]]:
            at = (at + 1) % len(ring)
        worker = ring[at][1]
        room[worker] -= 1
        placed[queue, number] = worker
    return placed


def _points(worker: str) -> list[int]:
    digests = math.ceil(POINTS / _PER_DIGEST)
    return [point for number in range(digests) for point in _numbers(f"{worker}#{number}", 8 * _PER_DIGEST)]


def _numbers(text: str, size: int) -> list[int]:
    """Return a digest of *size* bytes as numbers of 64 bits."""
    digest = blake2b(text.encode("utf-8", "surrogateescape"), digest_size=size).digest()
    return [int.from_bytes(digest[at : at + 8], "big") for at in range(0, size, 8)]


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
