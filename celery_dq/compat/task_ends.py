"""The ends of a task that are failures for good, as Celery's ``Request.on_failure`` decides.

Celery acknowledges the message in the same call, and a dead letter must be made before.
"""

from __future__ import annotations

from typing import Any

from billiard.exceptions import Terminated, TimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry

from celery_dq.compat.guard import check

__all__ = ["fails_for_good", "requeues_timeout"]

check("task_ends")


def fails_for_good(request: Any, error: BaseException, crashed: bool) -> bool:
    """Return whether Celery will record a failure of the task, and not run it again.

    Args:
        request: Celery's request.
        error: the error with which the task has ended.
        crashed: the process of the task was lost.
    """
    if isinstance(error, (Retry, Ignore, Reject, Terminated)) or request._already_revoked:
        return False
    if isinstance(error, TimeLimitExceeded):
        return not requeues_timeout(request.task)
    return not crashed or _is_lost_for_good(request)


def requeues_timeout(task: Any) -> bool:
    """Return whether Celery requeues the message when a hard time limit has ended the task."""
    acks = getattr(task, "acks_on_timeout", None)  # since Celery 5.7
    return bool(task.acks_late) and not (task.acks_on_failure_or_timeout if acks is None else acks)


def _is_lost_for_good(request: Any) -> bool:
    task = request.task
    if getattr(task, "retry_on_worker_lost", False):  # since Celery 5.7
        runs_again = task.max_retries is None or request._context.retries < task.max_retries
    else:
        runs_again = task.acks_late and task.reject_on_worker_lost
    # Celery 5.7 records no failure of a process that has died after it had stored the result.
    has_succeeded = getattr(request, "_success_was_stored", bool)
    return not (runs_again or request._already_cancelled or has_succeeded())
