"""The retry in the end of a task."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery.exceptions import Retry

__all__ = ["delay_of", "raised"]


def raised(info: Any) -> BaseException | None:
    """Return the exception of a task, which Celery wraps with its traceback. A Retry is not unwrapped."""
    exc: Any = getattr(info, "exception", None)
    return exc if isinstance(exc, Retry) else getattr(exc, "exc", None) or exc


def delay_of(exc: Retry) -> float:
    """Seconds until a retry is due."""
    when: Any = exc.when
    if isinstance(when, datetime):
        return max((when - datetime.now(when.tzinfo)).total_seconds(), 0.0)
    return float(when or 0.0)
