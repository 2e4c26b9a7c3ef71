"""Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018, arXiv:1608.01350). Pure.

Each worker has 1,000 points on a ring of 2⁶⁴ positions. A partition belongs to the next point clockwise whose
worker is not full. A worker is full at ``ceil(1.05 × mean)`` partitions.

The partitions of one queue lie at equal distances, by the golden ratio, and not at random. So the loads
differ less, fewer workers are full, and fewer partitions move when a worker comes or goes. The position of a
partition does not depend on the number of partitions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from hashlib import blake2b

__all__ = ["BOUND", "POINTS", "Unit", "bound", "place"]

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


def bound(units: int, workers: int) -> int:
    """Return the largest number of partitions that one of *workers* gets of *units*."""
    # In whole numbers: 1.05 as a binary fraction is a little too large, and would raise whole results by one.
    return -(-units * round(BOUND * 100) // (100 * workers))


def place(units: Iterable[Unit], workers: Iterable[str]) -> dict[Unit, str]:
    """Return the worker of each partition. The result does not depend on the order of the arguments.

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
