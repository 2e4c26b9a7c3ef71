"""Signals of dedup, as Celery's are."""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["claim_lost", "verdict_given"]

#: A call got its verdict. Sent in the process that published it, on a tenant broker, and in the worker that
#: received it, on another one. ``sender``: the task's name; ``verdict`` (accept, block, decline), ``key``,
#: ``task_id``, ``covering`` (task id of who covers it or is ahead), ``replaced`` (of who gave up its place,
#: or "").
verdict_given = Signal(
    name="verdict_given", providing_args=["verdict", "key", "task_id", "covering", "replaced"]
)

#: A run has lost its key, and another one may be running beside it: it was evicted, an operator took the
#: key away, or (on a broker without verdicts) its worker did not renew its lease in time. Sent in the worker.
#: ``sender``: the coordinator, or the app on a tenant broker; ``key``, ``task_id``, ``token`` (the fencing
#: token that is void now).
claim_lost = Signal(name="claim_lost", providing_args=["key", "task_id", "token"])
