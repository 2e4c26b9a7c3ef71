"""A clock that jumps between the sending of a request and its answer."""

from __future__ import annotations

from typing import Any

from celery_dq.clock import SystemClock

__all__ = ["JumpingClock"]


class JumpingClock:
    """The clocks of this machine, and the jumps that a test adds to them.

    Hand it to whatever takes a :class:`celery_dq.clock.Clock`. Both of its clocks go on by themselves.
    """

    def __init__(self) -> None:
        self._system = SystemClock()
        self._ahead_s = 0.0
        self._wall_ahead_s = 0.0

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC, and the jumps."""
        return self._system.wall() + self._wall_ahead_s

    def monotonic(self) -> float:
        """Seconds since boot, and the jumps."""
        return self._system.monotonic() + self._ahead_s

    def jump(self, seconds: float) -> None:
        """Let both clocks jump ahead, as if the process had stood still."""
        self._ahead_s += seconds
        self._wall_ahead_s += seconds

    def set_wall_ahead(self, seconds: float) -> None:
        """Let the wall clock be wrong by `seconds`; the monotonic one stays."""
        self._wall_ahead_s = seconds

    def jump_before_answer(self, target: Any, method: str, seconds: float, *, call: int = 1) -> None:
        """Jump once between a call of ``target.method`` and its answer.

        Args:
            target: the object whose method is replaced on the instance.
            method: the name of the method, which is really called.
            seconds: how far to jump.
            call: which call the jump falls into, counted from 1.
        """
        real, calls = getattr(target, method), 0

        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            try:
                return real(*args, **kwargs)
            finally:
                if calls == call:
                    self.jump(seconds)

        setattr(target, method, called)
