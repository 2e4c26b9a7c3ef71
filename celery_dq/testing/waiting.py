"""Waiting for something to become true, with a deadline instead of a guess."""

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
    """Call `condition` until it returns something true, and return that.

    :param condition: looked at once in any case, then every `interval_s` seconds.
    :param timeout_s: seconds until :exc:`TimeoutError` is raised; default 30.
    :param what: what was waited for, for the error; a callable is asked only then, so that it can
        tell what there is instead.
    :param interval_s: pause between two looks; default 10 ms.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            told = what() if callable(what) else what
            raise TimeoutError(
                f"not within {timeout_s:g} s: {told or getattr(condition, '__name__', repr(condition))}"
            )
        time.sleep(interval_s)
