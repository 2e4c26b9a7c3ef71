"""The boot steps that celery-dq adds to a worker."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps
from celery.utils.log import worker_logger
from celery.worker import state

from celery_dq.clock import SystemClock
from celery_dq.context import AppContext
from celery_dq.errors import ConfigurationError, ServerError
from celery_dq.shown import shell_word, shown_logger
from celery_dq.transport.aliases import TENANT_SCHEMES, leases_messages
from celery_dq.transport.in_flight import Message
from celery_dq.transport.redis.store.server_errors import BrokerRefused
from celery_dq.worker.lifecycle import PoolCapacity, TaskLifecycle
from celery_dq.worker.task_events import task_events

logger = shown_logger(__name__)


class ContextStep(bootsteps.StartStopStep):
    """A boot step that Celery leaves out, with its ``start`` and ``stop``, where it has nothing to do."""

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        context = AppContext.of(consumer.conninfo)
        if context is None:
            raise ConfigurationError(
                "connection_for_read() of the app returns a connection that app.connection() has not made, "
                "so the worker would know no setting of celery-dq: return app.connection(…), which takes the "
                "arguments of kombu.Connection"
            )
        self.enabled = self.prepare(consumer, context)

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Prepare the step; return False for another broker, or without the setting of the step."""
        raise NotImplementedError


class ConsumerStep(ContextStep):
    """Connects Celery's consumer with the tenant broker, or with one above another store.

    Does nothing for other brokers. ``start`` and ``stop`` run at every reconnect; the hooks that the
    constructor installs last as long as the worker.
    """

    requires = ("celery_dq.worker.task_events:TaskEventsStep",)

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Install the hooks, on a broker that leases messages."""
        if not leases_messages(consumer.conninfo):
            return False
        context.worker = consumer.hostname
        worker_logger.addFilter(_without_traceback)
        options, events = context.options, task_events(consumer)
        lifecycle = TaskLifecycle(consumer.pool, SystemClock(), options.dead_letter_failures)
        events.subscribe(lifecycle)
        self._capacity = context.capacity = PoolCapacity(consumer, lifecycle, options.claim_ahead_us / 1e6)
        context.consumed_queues = lambda connection: (
            consumer.app.amqp.queues.consume_from.values() if connection is consumer.connection else ()
        )
        _dead_letter_unrunnable(consumer, consumer.conninfo.transport_cls in TENANT_SCHEMES)
        return True

    def start(self, consumer: Any) -> None:
        """Reserve the slots of the pool's jobs in Celery's state again, after a lost connection.

        Celery 5.5 forgets all reserved requests, later versions those that have not begun. The pool would
        seem empty.
        """
        for request in task_events(consumer).requests:
            # The set is weak, so a request that ends just now in another thread leaves it by itself.
            state.reserved_requests.add(request)

    def stop(self, consumer: Any) -> None:
        """Release waiting requests: the connection is lost, or the worker stops."""
        if self._capacity.ready_requests is not None:
            self._capacity.ready_requests.release_all()

    def shutdown(self, consumer: Any) -> None:
        """Note that the pool is drained or killed: messages that are still held may run elsewhere."""
        self._capacity.over = True


def _without_traceback(record: logging.LogRecord) -> bool:
    """Leave the sentence of Celery's record of an error that an operator must mend."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (ConfigurationError, ServerError, BrokerRefused)):
        record.msg, record.args, record.exc_info = "The worker ends: %s", (str(error),), None
    return True


def _dead_letter_unrunnable(consumer: Any, has_commands: bool) -> None:
    """Keep messages that this worker cannot run as dead letters, where Celery would drop them.

    Args:
        consumer: Celery's consumer.
        has_commands: Whether ``celery dq`` can replay the dead letters.
    """
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
                "Deploy the task to the workers, then replay the message%s.",
                exc,
                message.message_id,
                message.queue,
                f": celery dq dead replay {shell_word(message.queue)} {shell_word(message.message_id)}"
                if has_commands
                else "",
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
