"""The save of a wrapped scheduler of Celery beat."""

from __future__ import annotations

from typing import Any

from celery_dq.compat.guard import check

check("beat_sync")


def save_schedule(scheduler: Any) -> None:
    """Let the scheduler save, and count its calls until the next save from 0."""
    scheduler._do_sync()
