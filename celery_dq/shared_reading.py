"""A call of a server in a thread of its own, for which viewers wait, each until a deadline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from celery_dq.daemon_threads import start_daemon

__all__ = ["SharedReading"]

T = TypeVar("T")

#: Seconds after its begin for which a reading that has ended serves further viewers.
FRESH_S = 1.0


class SharedReading(Future[T]):
    """A call that may outlast those that wait for it. Then it ends when its connection times out.

    Args:
        began: Its begin in seconds, by the clock of the viewers that share it.
    """

    def __init__(self, began: float = 0.0) -> None:
        super().__init__()
        self.began = began

    def start(self, name: str, call: Callable[[], T]) -> None:
        """Make the call in a thread, for which the end of the process does not wait.

        When no thread can start, the reading has ended with that error.
        """
        try:
            start_daemon(self._run, name, call)
        except RuntimeError as exc:
            self.set_exception(exc)

    def is_fresh(self, now: float) -> bool:
        """Whether it serves further viewers."""
        return not self.done() or now - self.began < FRESH_S

    def ends_within(self, timeout_s: float) -> bool:
        """Wait, and return whether it has ended. A call may raise a TimeoutError, as ``result`` would."""
        return bool(wait([self], max(timeout_s, 0.0)).done)

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self.set_result(call())
        except BaseException as exc:  # those that wait raise it
            self.set_exception(exc)
