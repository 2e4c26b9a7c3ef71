"""Wall time and monotonic time, and a clock that tests can set.

*Wall time* (seconds since 1970, UTC) is for values that other machines read: expiry times and reports. It may
jump. *Monotonic time* (seconds since an unspecified point) is for waiting and for the age of a lease. It
never goes back. It continues while the machine is suspended, because the lease in the broker does so too.

Scripts that run in Redis use neither; they use the clock of Redis.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """The interface of a clock. Code whose decisions depend on time takes one as an argument."""

    def wall(self) -> float:
        """Return the seconds since 1970-01-01 UTC, for storage and display."""

    def monotonic(self) -> float:
        """Return the seconds since an unspecified point, suspend included, for waits and comparisons."""


class SystemClock:
    """The clocks of this machine.

    On Linux the monotonic clock is ``CLOCK_BOOTTIME``. Elsewhere it is Python's :func:`time.monotonic`, which
    may stop while the machine is suspended. Both are functions in C: each call and message asks for the time.
    """

    wall = staticmethod(time.time)
    if sys.platform == "linux":
        monotonic = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
    else:
        monotonic = staticmethod(time.monotonic)

    def __repr__(self) -> str:
        return "SystemClock()"


class ManualClock:
    """A clock for tests, which moves only by :meth:`advance` and :meth:`set_wall`. Thread-safe.

    Args:
        wall: Wall time at the start, in seconds since 1970-01-01 UTC.
        monotonic: Monotonic time at the start, in seconds.
    """

    def __init__(self, wall: float = 1_700_000_000.0, monotonic: float = 1_000.0) -> None:
        self._lock = threading.Lock()
        self._wall = wall
        self._monotonic = monotonic

    def wall(self) -> float:
        """Return the wall time in seconds since 1970-01-01 UTC."""
        with self._lock:
            return self._wall

    def monotonic(self) -> float:
        """Return the monotonic time in seconds: the start plus all seconds of :meth:`advance`."""
        with self._lock:
            return self._monotonic

    def advance(self, seconds: float) -> None:
        """Move both clocks forward.

        Args:
            seconds: By how much, 0 or more.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}) would move time back: use set_wall for a jump")
        with self._lock:
            self._wall += seconds
            self._monotonic += seconds

    def set_wall(self, wall: float) -> None:
        """Set the wall clock to `wall`, as NTP or an administrator may. The monotonic clock stays."""
        with self._lock:
            self._wall = wall

    def __repr__(self) -> str:
        return f"ManualClock(wall={self.wall()!r}, monotonic={self.monotonic()!r})"
