"""How long the claims of a process took, by queue, for the metrics of a worker."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import ClassVar

__all__ = ["ClaimTimes"]


class ClaimTimes:
    """A histogram of the times from sending a claim to reading its answer. One thread adds, others read.

    Attributes:
        bounds_s: Upper bounds of the buckets, in seconds.
        buckets: Number of claims in each bucket.
        sum_s: Sum of the times, in seconds.
    """

    bounds_s: ClassVar[tuple[float, ...]] = (
        *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0),
        math.inf,
    )

    def __init__(self) -> None:
        self.buckets = [0] * len(self.bounds_s)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one claim."""
        self.buckets[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds
