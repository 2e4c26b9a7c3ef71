"""A circuit breaker: calls to a broker that does not answer fail at once. Pure except for its clock.

A *closed* breaker admits each call. After a number of failures in a row, or one call that used up its
timeout, the breaker is *open* and calls fail at once. After a pause one call, the *probe*, is admitted. Its
success closes the breaker, its failure starts another pause.
"""

from __future__ import annotations

import threading
from typing import Literal, TypeAlias

from celery_dq.clock import Clock
from celery_dq.per_process import OwnerProcess

__all__ = ["CircuitBreaker", "CircuitState"]

CircuitState: TypeAlias = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """Thread-safe; a forked child begins with a closed breaker.

    Args:
        failures: Number of failures in a row that opens the breaker; 0 never opens it.
        pause_s: Seconds for which it stays open.
        clock: Its monotonic time measures the pause.
    """

    def __init__(self, failures: int, pause_s: float, clock: Clock) -> None:
        self._failures = failures
        self._pause_s = pause_s
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._owner = OwnerProcess()
        # Re-entrant, because a destructor that runs under the lock may publish too.
        self._lock = threading.RLock()
        self._failed = 0
        self._open_until: float | None = None
        self._probing_until: float | None = None
        self.last_error = ""

    @property
    def state(self) -> CircuitState:
        """The present state."""
        if self._open_until is None:
            return "closed"
        return "open" if self._clock.monotonic() < self._open_until else "half-open"

    def admit(self, within_s: float) -> float:
        """Ask for permission before a call. The caller reports the outcome of an admitted call.

        Args:
            within_s: Seconds after which a probe without an outcome no longer blocks the next probe.

        Returns:
            0 when the call is admitted; else the seconds until the next probe.
        """
        if not self._owner.is_current:
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
        """Report that the broker answered."""
        if self._failed or self._open_until is not None:
            with self._lock:
                self._failed, self._open_until, self._probing_until = 0, None, None

    def abstained(self) -> None:
        """Report that the call failed for a reason that says nothing about the broker."""
        if self._probing_until is not None:
            with self._lock:
                self._probing_until = None

    def failed(self, error: BaseException, *, hung: bool) -> None:
        """Report that the broker did not answer.

        Args:
            error: The error of the call.
            hung: Whether the call used up its timeout; one such call opens the breaker.
        """
        with self._lock:
            self.last_error = str(error) or repr(error)
            self._failed += 1
            self._probing_until = None
            if self._failures and (hung or self._failed >= self._failures or self._open_until is not None):
                self._open_until = self._clock.monotonic() + self._pause_s
