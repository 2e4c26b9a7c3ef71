"""Decides how many discards one claim takes, and how long none follows, so that they delay no message much.

A discard needs no pool slot, but the fetching thread records it, and delivers no message for that time. The
claim script applies the rest to the whole queue, whose consumers share it. So neither Redis nor a worker is
busy with discards all the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery_dq.clock import Clock

#: Seconds that the discards of one claim may take: a new message waits for that long.
SLICE_S = 0.001
#: Discards of one claim before one was measured, and the most for any claim: receiving one takes time, too.
FIRST, MOST = 4, 8
#: Seconds from one claim of discards to the next by the same consumer, at least and at most.
MIN_REST_S, MAX_REST_S = 0.002, 1.0
#: Length of a rest, in times of the seconds that the discards of the claim take.
REST_SHARE = 2


class DiscardPace:
    """Measures how long a process takes to record a discard.

    Args:
        clock: measures by its monotonic time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: float | None = None

    def room(self) -> int:
        """Return how many discards the next claim may take."""
        if self._seconds is None:
            return FIRST
        return max(1, min(int(SLICE_S / max(self._seconds, 1e-6)), MOST))

    def rest_s(self) -> float:
        """Return how long this process takes no other discards after a claim that brought some."""
        took = 0.0 if self._seconds is None else self.room() * self._seconds
        return min(max(REST_SHARE * took, MIN_REST_S), MAX_REST_S)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record one discard inside the ``with``."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            seen = self._clock.monotonic() - began
            self._seconds = seen if self._seconds is None else 0.8 * self._seconds + 0.2 * seen
