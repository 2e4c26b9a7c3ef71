"""Celery's bookkeeping for the task of a dead letter."""

from __future__ import annotations

import logging
import sys
from typing import Any

from celery import signals
from kombu.utils.imports import symbol_by_name

from celery_dq.errors import DeliveriesExhausted
from celery_dq.worker.task_events import task_events

logger = logging.getLogger(__name__)


def fail_task(consumer: Any, message: Any, name: str, why: str) -> None:
    """Record that the task of a dead letter has failed, and acknowledge the message.

    Args:
        consumer: Celery's consumer.
        message: the message, with its ``deliveries``.
        name: the name of the task, which the app must know.
        why: the reason of the dead letter.
    """
    app = consumer.app
    task = app.tasks[name]
    exc = DeliveriesExhausted(
        f"{name}[{message.headers['id']}] was dead-lettered after {message.deliveries} deliveries ({why}): "
        "every worker that ran it was lost. Look for the cause, then replay it from the dead letters."
    )
    try:
        request = symbol_by_name(task.Request)(message, app=app, task=task, hostname=consumer.hostname)
        task.backend.mark_as_failure(
            request.id, exc, request=request._context, store_result=request.store_errors
        )
        try:
            raise exc
        except DeliveriesExhausted:
            signals.task_failure.send(
                sender=task,
                task_id=request.id,
                exception=exc,
                args=request.args,
                kwargs=request.kwargs,
                traceback=exc.__traceback__,
                einfo=sys.exc_info(),
            )
    except Exception:
        # The dead letter is stored. A result backend that is down must not end the worker.
        logger.exception(
            "Could not record the failure of task %s[%s]; its dead letter is stored.",
            name,
            message.headers["id"],
            extra={"event": "task_failure_not_recorded"},
        )
    logger.error("Task %s", exc, extra={"event": "deliveries_exhausted"})
    task_events(consumer).exhausted(message, why)
    message.ack()
