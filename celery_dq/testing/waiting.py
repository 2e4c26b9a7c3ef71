"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    timeout_s: float = 30.0,
    *,
    what: str | Callable[[], str] = "",
    interval_s: float = 0.01,
) -> T:
    """Call a condition until it returns a true value, and return that value.

    Args:
        condition: Called at least once, then every `interval_s` seconds.
        timeout_s: Seconds until the timeout.
        what: Description of the condition, for the error. A callable is called only for the error, so it can
            describe the present state.
        interval_s: Pause in seconds between two calls.

    Raises:
        TimeoutError: The condition was not true in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            detail = what() if callable(what) else what
            raise TimeoutError(
                f"not within {timeout_s:g} s: {detail or getattr(condition, '__name__', repr(condition))}"
            )
        time.sleep(interval_s)
