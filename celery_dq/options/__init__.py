"""Checked settings: one table of what exists, one way to read it, frozen objects as the result."""

from __future__ import annotations

from celery_dq.options.quota import Quota
from celery_dq.options.resolve import resolve
from celery_dq.options.sections import Options, QueueOptions

__all__ = ["Options", "QueueOptions", "Quota", "resolve"]
