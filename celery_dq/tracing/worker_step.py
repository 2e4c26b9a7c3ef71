"""The boot step that makes spans in a worker of a tenant broker, with ``dq_otel``.

The instrumentation of Celery makes a span of the run. It does not see for how long the message was in the
worker before, nor which delivery it was, nor that a message became a dead letter. A worker that is killed
loses the span of the run, so its deliveries and the dead letter are all that the trace shows.
"""

from __future__ import annotations

from typing import Any

from celery_dq.clock import Clock, SystemClock
from celery_dq.context import AppContext
from celery_dq.errors import MissingLibrary
from celery_dq.keys import PartitionKeys
from celery_dq.shown import shown_logger
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.in_flight import Message
from celery_dq.worker.bootsteps import ContextStep
from celery_dq.worker.task_events import TaskSubscriber, task_events

__all__ = ["TracingStep"]

logger = shown_logger(__name__)


class TracingStep(ContextStep):
    """Follows the tasks of the worker. Without ``dq_otel``, and for other brokers, it does nothing."""

    requires = ("celery_dq.worker.bootsteps:ConsumerStep",)

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Follow the tasks, on a tenant broker with ``dq_otel``."""
        if consumer.conninfo.transport_cls not in TENANT_SCHEMES or not context.options.otel:
            return False
        task_events(consumer).subscribe(TaskTracing(SystemClock(), consumer.hostname))
        return True


class TaskTracing(TaskSubscriber):
    """Makes the spans of one worker, in its main process.

    Args:
        clock: Its monotonic time is that of the deliveries.
        worker: Name of the worker, for the log.

    Raises:
        MissingLibrary: opentelemetry-api is not installed.
    """

    role = "tracing"

    def __init__(self, clock: Clock, worker: str) -> None:
        try:
            from celery_dq.tracing.spans import message_span, provider_is_set
        except ImportError as exc:
            raise MissingLibrary.needed_by("dq_otel = True", "opentelemetry-api", "otel") from exc
        self._clock = clock
        self._message_span = message_span
        self._provider_is_set = provider_is_set
        self._worker = worker
        self._has_warned = False

    def follows(self, request: Any) -> bool:
        """See :class:`TaskSubscriber`."""
        return isinstance(request.message, Message)

    def accepted(self, request: Any) -> None:
        """Record the time between the delivery and the start of the task."""
        message: Message = request.message
        self._record("receive", "receive", message, seconds=self._clock.monotonic() - message.claimed_at)

    def ended(self, request: Any, info: Any) -> None:
        """Record that the message became a dead letter."""
        message: Message = request.message
        if message.dead_letter_reason:
            self._record("dead_letter", "settle", message, error=message.dead_letter_reason)

    def exhausted(self, message: Any, why: str) -> None:
        """Record that each of the deliveries of a message has lost a worker."""
        if isinstance(message, Message):
            self._record("dead_letter", "settle", message, error=why)

    def _record(
        self, operation: str, kind: str, message: Message, *, seconds: float = 0.0, error: str = ""
    ) -> None:
        # An application may set its provider as late as it likes, so the first span is the time to look.
        if not self._has_warned and not self._provider_is_set():
            self._has_warned = True
            logger.warning(
                "No tracer provider is set in the main process of worker %s: its spans 'receive' and "
                "'dead_letter' of dq_otel are lost. Set the provider in a receiver of signal worker_init, "
                "which runs before the pool forks, instead of worker_process_init.",
                self._worker,
                extra={"event": "tracer_provider_missing", "worker": self._worker},
            )
        attributes: dict[str, Any] = {"celery_dq.deliveries": message.deliveries}
        if message.record.tenant:
            attributes["celery_dq.tenant"] = message.record.tenant
        keys = PartitionKeys.parse(message.prefix)
        if keys is not None:
            attributes["messaging.destination.partition.id"] = str(keys.partition)
        self._message_span(
            operation,
            kind,
            message.queue,
            message.headers,
            seconds=max(seconds, 0.0),
            end_ns=int(self._clock.wall() * 1e9),
            error=error,
            **attributes,
        )
