"""A beat that may run many times and ticks once: ``celery beat -S celery_dq.beat:ElectedScheduler``."""

from __future__ import annotations

from celery_dq.beat.scheduler import ElectedScheduler

__all__ = ["ElectedScheduler"]
