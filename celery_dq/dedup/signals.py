"""Signals of dedup, as Celery's are."""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["verdict_given"]

#: A call got its verdict. Sent in the process that published it, on a tenant broker, and in the worker that
#: received it, on another one. ``sender``: the task's name; ``verdict`` (accept, block, decline), ``key``,
#: ``task_id``, ``covering`` (task id of who covers it or is ahead), ``replaced`` (of who gave up its place,
# or "").
verdict_given = Signal(
    name="verdict_given", providing_args=["verdict", "key", "task_id", "covering", "replaced"]
)
