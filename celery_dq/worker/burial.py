"""Celery's bookkeeping for a task that was given up on."""

from __future__ import annotations

import logging
import sys
from typing import Any

from billiard.exceptions import WorkerLostError
from celery import signals
from kombu.utils.imports import symbol_by_name

from celery_dq.errors import DeliveriesExhausted

logger = logging.getLogger(__name__)


def is_crash(info: Any) -> bool:
    """Whether a pool's error says that whoever ran the task was lost."""
    exc = getattr(info, "exception", None)
    # billiard wraps even what has not crossed a process.
    return isinstance(getattr(exc, "exc", exc), (WorkerLostError, SystemExit, KeyboardInterrupt))


def fail(consumer: Any, message: Any, name: str, why: str) -> None:
    """Record that the task of a dead letter has failed, and acknowledge the message.

    Arguments:
        consumer: Celery's.
        message: with its ``deliveries``.
        name: of the task, which the app knows.
        why: it was given up on.
    """
    app = consumer.app
    task = app.tasks[name]
    exc = DeliveriesExhausted(
        f"{name}[{message.headers['id']}] was given up on after {message.deliveries} deliveries ({why}): "
        "every worker that had it was lost. It is among the dead letters."
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
        # The dead letter is safe; the worker must not die of a result backend that is down.
        logger.exception("The failure of %s[%s] could not be recorded.", name, message.headers["id"])
    logger.error("%s", exc)
    message.ack()
