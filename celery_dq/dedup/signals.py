"""The signals of dedup, of the same kind as Celery's."""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["dedup_lock_lost", "verdict_given"]

#: A call got its verdict. On a tenant broker the publishing process sends the signal; on another broker the
#: worker that received the call. ``sender``: the task's name; ``verdict`` (accept, block, decline), ``key``,
#: ``task_id``, ``covering`` (task id of the call that covers it or is ahead), ``replaced`` (task id of the
#: call that lost its place, or "").
verdict_given = Signal(
    name="verdict_given", providing_args=["verdict", "key", "task_id", "covering", "replaced"]
)

#: A run has lost its dedup lock, and another run may have begun: the run was evicted, an operator released
#: the lock, or (on a broker without verdicts) its worker did not renew the lease in time. Sent in the worker.
#: ``sender``: the coordinator, or the app on a tenant broker; ``key``, ``task_id``, ``token`` (the fencing
#: token that is void now).
dedup_lock_lost = Signal(name="dedup_lock_lost", providing_args=["key", "task_id", "token"])
