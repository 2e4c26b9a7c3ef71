"""The save and the order of a wrapped scheduler of Celery beat."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from celery_dq.compat.guard import check

check("beat_sync")


def save_schedule(scheduler: Any) -> None:
    """Let the scheduler save, and count its calls until the next save from 0."""
    scheduler._do_sync()


def postpone(scheduler: Any, seconds: Mapping[str, float]) -> None:
    """Let the scheduler try some entries only after so many seconds.

    Args:
        scheduler: A scheduler that has just sorted its entries.
        seconds: The seconds, by the name of the entry.
    """
    scheduler._heap = [
        event._replace(time=max(event.time, scheduler._when(event.entry, seconds[event.entry.name])))
        if event.entry.name in seconds
        else event
        for event in scheduler._heap
    ]
    heapq.heapify(scheduler._heap)
