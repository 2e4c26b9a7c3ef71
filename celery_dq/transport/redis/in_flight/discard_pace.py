"""Decides how many discards one claim takes, so that they delay other messages only shortly.

A discard needs no pool slot, but the fetching thread records it, and delivers no message for that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery_dq.clock import Clock

#: Seconds that the discards of one claim may take: a new message waits for that long.
SLICE_S = 0.001
#: Discards of one claim before one was measured, and the most for any claim: receiving one takes time, too.
FIRST, MOST = 4, 8


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

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record one discard inside the ``with``."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            seen = self._clock.monotonic() - began
            self._seconds = seen if self._seconds is None else 0.8 * self._seconds + 0.2 * seen
