"""Progress of calls that change many messages in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

from celery_dq.duration import parse_rate

T = TypeVar("T")

#: Called after each chunk with the number of messages, or other things, that the call has changed by then.
OnProgress: TypeAlias = Callable[[int], object]


def rate_per_second(rate: str | float | None) -> float | None:
    """Return the number of a rate such as ``"50/s"``; None is without a limit.

    Raises:
        ConfigurationError: It is not a rate.
    """
    instead = "leave it out for as fast as possible"
    return None if rate is None else parse_rate(rate, option="rate", instead=instead)


def paced(items: Iterable[T], per_second: float | None) -> Iterator[T]:
    """Yield items, at most `per_second` of them in a second; None is without a limit.

    After a stall, such as a slow request, the rate goes on: nothing is made up for.
    """
    due = time.monotonic()
    for item in items:
        if per_second is not None:
            time.sleep(max(due - time.monotonic(), 0))
            due = max(due + 1 / per_second, time.monotonic())
        yield item


def ignore_progress(done: int) -> None:
    """Do nothing: the default of calls that report their progress."""
