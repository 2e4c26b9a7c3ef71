"""Two clocks, never to be mixed up: one to store, one to wait.

*Wall time* (seconds since 1970, UTC) is for what other machines read: expiry
times, reports. It may jump. *Monotonic time* (seconds since some point) is for
waiting and for trust in a lease: it never goes back, and it goes on while the
machine is suspended, because the lease in the broker does so too.

Scripts that run in Redis use neither; they ask Redis.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """What tells the time. Hand one in where time decides something."""

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC: to store and to show."""

    def monotonic(self) -> float:
        """Seconds since an unspecified point, suspend included: to wait and to compare."""


class SystemClock:
    """The clocks of this machine.

    On Linux the monotonic one is ``CLOCK_BOOTTIME``. Elsewhere it is Python's
    :func:`time.monotonic`, which may stand still while the machine is suspended.
    """

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        return time.time()

    if sys.platform == "linux":

        def monotonic(self) -> float:
            """Seconds since boot, suspend included."""
            return time.clock_gettime(time.CLOCK_BOOTTIME)

    else:

        def monotonic(self) -> float:
            """Seconds since an unspecified point."""
            return time.monotonic()

    def __repr__(self) -> str:
        return "SystemClock()"


class ManualClock:
    """A clock that moves only when told to: for tests of what time decides. Thread-safe."""

    def __init__(self, wall: float = 1_700_000_000.0, monotonic: float = 1_000.0) -> None:
        self._lock = threading.Lock()
        self._wall = wall
        self._monotonic = monotonic

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC, as set."""
        with self._lock:
            return self._wall

    def monotonic(self) -> float:
        """Seconds that :meth:`advance` has added to the start."""
        with self._lock:
            return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass on both clocks."""
        if seconds < 0:
            raise ValueError(f"time does not go back: advance({seconds!r}); use set_wall for a jump")
        with self._lock:
            self._wall += seconds
            self._monotonic += seconds

    def set_wall(self, wall: float) -> None:
        """Let the wall clock jump to `wall`, as NTP or an administrator may; the other one stays."""
        with self._lock:
            self._wall = wall

    def __repr__(self) -> str:
        return f"ManualClock(wall={self.wall()!r}, monotonic={self.monotonic()!r})"
