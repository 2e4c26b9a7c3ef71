"""The record of a retry, which Celery makes in the process of the task after a ``Retry``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.app import trace

from celery_dq.compat.guard import check

check("retry_records")

_TraceInfo: Any = trace.TraceInfo
_handle_retry: Callable[..., Any] = _TraceInfo.handle_retry


def keep_retries(keeps: Callable[[Any, Any, Exception, Exception], bool]) -> None:
    """Let a run stay a retry although its record fails. Celery would report the run as failed. Idempotent.

    The record fails when the result backend is away, or when ``on_retry`` of the task raises an error.

    Args:
        keeps: Gets the task, its request, the ``Retry`` and the error of the record; returns whether the run
            stays a retry. The signal ``task_retry``, which Celery has not sent then, is sent after it.
    """

    @wraps(_handle_retry)
    def handle_retry(self: Any, task: Any, req: Any, *args: Any, **options: Any) -> Any:
        try:
            return _handle_retry(self, task, req, *args, **options)
        except Exception as error:
            reason = self.retval
            if not keeps(task, req, reason, error):
                raise
            einfo = ExceptionInfo((type(reason), reason, reason.__traceback__))
            signals.task_retry.send(sender=task, request=req, reason=reason, einfo=einfo)
            return einfo

    _TraceInfo.handle_retry = handle_retry
