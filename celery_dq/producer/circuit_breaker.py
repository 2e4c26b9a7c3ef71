"""When a broker that does not answer is not asked any more. Pure, but for the clock it is given.

*Closed*: every call goes through. After so many failures in a row, or one that took all of its time, it is
*open*: calls fail at once. After a pause one call, the *probe*, goes through: when it succeeds the breaker
closes, when it fails the pause begins anew.
"""

from __future__ import annotations

import os
import threading
from typing import Literal, TypeAlias

from celery_dq.clock import Clock

__all__ = ["CircuitBreaker", "CircuitState"]

CircuitState: TypeAlias = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """Safe between threads; a forked child begins with a closed one.

    :param failures: in a row that open it; 0 never does.
    :param pause_s: seconds for which it is open.
    """

    def __init__(self, failures: int, pause_s: float, clock: Clock) -> None:
        self._failures = failures
        self._pause_s = pause_s
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        # Re-entrant: a destructor in the middle of it may publish as well.
        self._lock = threading.RLock()
        self._failed = 0
        self._open_until: float | None = None
        self._probing_until: float | None = None
        self.last_error = ""

    @property
    def state(self) -> CircuitState:
        """As of now."""
        if self._open_until is None:
            return "closed"
        return "open" if self._clock.monotonic() < self._open_until else "half-open"

    def admit(self, within_s: float) -> float:
        """Ask before a call. 0: go ahead, and tell the outcome; else for how many seconds not to.

        :param within_s: seconds after which a probe that told no outcome is given up on.
        """
        if self._pid != os.getpid():
            self._begin()
        if self._open_until is None:
            return 0.0
        with self._lock:
            now = self._clock.monotonic()
            closed_at = max(self._open_until or 0.0, self._probing_until or 0.0)
            if self._open_until is None or now >= closed_at:
                self._probing_until = now + within_s
                return 0.0
            return closed_at - now

    def succeeded(self) -> None:
        """The broker has answered."""
        if self._failed or self._open_until is not None:
            with self._lock:
                self._failed, self._open_until, self._probing_until = 0, None, None

    def abstained(self) -> None:
        """The call failed for reasons of its own, and says nothing about the broker."""
        if self._probing_until is not None:
            with self._lock:
                self._probing_until = None

    def failed(self, error: BaseException, *, hung: bool) -> None:
        """The broker has not answered.

        :param hung: it took all the time that a call has: one is enough.
        """
        with self._lock:
            self.last_error = str(error) or repr(error)
            self._failed += 1
            self._probing_until = None
            if self._failures and (hung or self._failed >= self._failures or self._open_until is not None):
                self._open_until = self._clock.monotonic() + self._pause_s
