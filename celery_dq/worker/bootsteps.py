"""The boot steps that celery-dq adds to a worker."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery import bootsteps
from celery.worker import state

from celery_dq.clock import SystemClock
from celery_dq.compat.pool_deaths import notice_deaths
from celery_dq.compat.pool_results import deliver_results_promptly
from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.redis.in_flight.message import Message
from celery_dq.worker.capacity import PoolCapacity
from celery_dq.worker.lifecycle import TaskLifecycle
from celery_dq.worker.ready_requests import ReadyRequests

logger = logging.getLogger(__name__)


class ConsumerStep(bootsteps.StartStopStep):
    """Connects Celery's consumer with the tenant broker.

    Does nothing for other brokers. ``start`` and ``stop`` run at every reconnect; the hooks that the
    constructor installs last as long as the worker.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._gate: PoolCapacity | None = None
        self._lifecycle: TaskLifecycle | None = None
        context = consumer.conninfo.transport_options.get(APP_CONTEXT)
        if isinstance(context, AppContext) and consumer.conninfo.transport_cls in TENANT_SCHEMES:
            options = context.options
            clock = SystemClock()
            lifecycle = TaskLifecycle(consumer.pool, clock, options.dead_letter_failures)
            self._lifecycle = lifecycle
            capacity = PoolCapacity(consumer, lifecycle, options.claim_ahead_us / 1e6)
            self._gate = context.capacity = capacity
            _start_with_care(consumer, lifecycle)
            if not lifecycle.asks_first:
                lifecycle.ready_requests = ReadyRequests(consumer, lambda: capacity.closing)
            _dead_letter_unrunnable(consumer)
            consumer.create_task_handler = partial(
                _careful_handler, consumer, lifecycle, consumer.create_task_handler
            )

    def start(self, consumer: Any) -> None:
        """Install the hooks in the pool, which runs now and has its own methods in place."""
        if self._lifecycle is not None:
            self._lifecycle.guard_flush(consumer.pool)
            self._lifecycle.reserve_again()
            notice_deaths(consumer.pool)
            deliver_results_promptly(consumer.pool)

    def stop(self, consumer: Any) -> None:
        """Release waiting requests: the connection is lost, or the worker stops."""
        if self._lifecycle is not None and self._lifecycle.ready_requests is not None:
            self._lifecycle.ready_requests.release_all()

    def shutdown(self, consumer: Any) -> None:
        """Note that the pool is drained or killed: messages that are still held may run elsewhere."""
        if self._gate is not None:
            self._gate.over = True


def _dead_letter_unrunnable(consumer: Any) -> None:
    """Keep messages that this worker cannot run as dead letters, where Celery would drop them."""
    unknown_message, unknown_task = consumer.on_unknown_message, consumer.on_unknown_task
    invalid_task, decode_error = consumer.on_invalid_task, consumer.on_decode_error

    def mark(message: Any, reason: str) -> None:
        if isinstance(message, Message):
            message.dead_letter_reason = reason[:500]

    def on_unknown_message(body: Any, message: Any) -> Any:
        mark(message, "unknown message")
        return unknown_message(body, message)

    def on_unknown_task(body: Any, message: Any, exc: Any) -> Any:
        mark(message, f"unknown task: {exc}")
        if isinstance(message, Message):
            # Celery's own line says that the message is discarded.
            logger.error(
                "Task %s is not registered in this worker: its message %s becomes a dead letter of queue %s. "
                "Deploy the task to the workers, then replay the message: celery dq dead replay %s %s",
                exc,
                message.message_id,
                message.queue,
                message.queue,
                message.message_id,
                extra={"event": "unknown_task_dead_lettered", "queue": message.queue},
            )
        return unknown_task(body, message, exc)

    def on_invalid_task(body: Any, message: Any, exc: Any) -> Any:
        mark(message, f"invalid task: {exc}")
        return invalid_task(body, message, exc)

    def on_decode_error(message: Any, exc: BaseException) -> Any:
        if isinstance(message, Message):
            # Celery acknowledges a message that it cannot decode, which would remove it.
            message.dead_letter(f"undecodable: {type(exc).__name__}: {exc}"[:500])
        return decode_error(message, exc)

    consumer.on_unknown_message, consumer.on_unknown_task = on_unknown_message, on_unknown_task
    consumer.on_invalid_task, consumer.on_decode_error = on_invalid_task, on_decode_error


def _careful_handler(consumer: Any, lifecycle: TaskLifecycle, make: Any, *args: Any, **kwargs: Any) -> Any:
    """Return Celery's handler, wrapped so that no message stops the worker.

    Celery expects a message that names a task to have the shape of one. A body of another shape, or a
    header of another type, raises any error and ends the worker. The message would return to its place and
    end the next worker.
    """
    handle = make(*args, **kwargs)

    def on_task_received(message: Any) -> Any:
        try:
            return handle(message)
        except (*consumer.connection_errors, *consumer.conninfo.channel_errors):
            raise
        except Exception as exc:
            if not _dead_letter_invalid(message, lifecycle, exc):
                raise
            return None

    return on_task_received


def _start_with_care(consumer: Any, lifecycle: TaskLifecycle) -> None:
    """Make a request that the pool cannot take a dead letter, and release its slot.

    Celery passes a request to a prefork pool when its semaphore has a slot, maybe in the callback of another
    task. An error there stops no worker, but the request keeps the slot and remains reserved for ever.
    """
    controller = consumer.controller
    start = controller._process_task

    def process_task(req: Any) -> Any:
        try:
            return start(req)
        except (*consumer.connection_errors, *consumer.conninfo.channel_errors):
            raise
        except Exception as exc:
            if not _dead_letter_invalid(req.message, lifecycle, exc):
                raise
            state.task_ready(req)
            release_slot = getattr(controller, "_quick_release", None)
            if release_slot is not None:  # as Celery does for a revoked task
                release_slot()
            return None

    # The semaphore calls the method by its name. The consumer of a pool without semaphore holds the method
    # itself.
    controller._process_task = process_task
    if consumer.on_task_request == start:
        consumer.on_task_request = process_task


def _dead_letter_invalid(message: Any, lifecycle: TaskLifecycle, exc: Exception) -> bool:
    """Dead-letter a message of which no task can be made, unless it is over or in the pool."""
    if not isinstance(message, Message) or message.acknowledged or message.delivery_tag in lifecycle.in_pool:
        return False
    logger.exception(
        "Message %s goes to the dead letters: it is no valid task.",
        message.message_id,
        extra={"event": "invalid_task_dead_lettered"},
    )
    message.dead_letter(f"invalid task: {type(exc).__name__}: {exc}"[:500])
    return True
