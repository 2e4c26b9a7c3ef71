"""The stage for unbuffered calls: one deadline for all steps of a call, and a circuit breaker.

Celery tries again after a lost connection, waits between attempts, and on some transports waits for an
answer for ever. Here every step has a third of ``dq_publish_timeout``, and no attempt begins in the last
third. After some calls in a row without an answer the next ones fail at once. The breaker does not apply to
calls of tasks and of beat: failing at once would break chains, or skip due times, during a short outage.

On the tenant broker a call of a running task has no deadline either: it is tried until the broker is back.
The call may be a retry or the next task of a chain, and would be lost. While the broker is away no other
worker can claim the message of the running task, so the task may wait.
"""

from __future__ import annotations

import math
import time
from functools import cached_property
from typing import Any

from kombu.exceptions import OperationalError

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.buffer_stage import LazyPoolProducer
from celery_dq.app.publishing.pipeline import Call, Proceed
from celery_dq.app.publishing.results import prepare_for_results
from celery_dq.app.timeouts import Deadline
from celery_dq.clock import SystemClock
from celery_dq.compat.celery_calls import in_task, running_task
from celery_dq.options.publishing import PublishingOptions
from celery_dq.producer.buffering_producer import BufferingProducer
from celery_dq.producer.circuit_breaker import CircuitBreaker
from celery_dq.producer.errors import BrokerUnavailable
from celery_dq.protocols import FOLLOWS

__all__ = ["DeadlineStage"]


class DeadlineStage:
    """See the module.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    @cached_property
    def _options(self) -> PublishingOptions:
        options: PublishingOptions = dq_of(self._app).options.publishing
        return options

    @cached_property
    def breaker(self) -> CircuitBreaker:
        """The circuit breaker of this app."""
        options = self._options
        return CircuitBreaker(options.breaker_failures, options.breaker_pause_us / 1e6, SystemClock())

    def send(self, call: Call, proceed: Proceed) -> Any:
        """See :class:`celery_dq.app.publishing.pipeline.Stage`.

        Raises:
            BrokerUnavailable: The broker does not answer, or did not answer the last calls.
        """
        options = call.options
        if (
            call.producer is not None
            or isinstance(options.get("producer"), BufferingProducer)
            or self._app.conf.task_always_eager
        ):
            return proceed(call)
        if not options.get("ignore_result"):
            prepare_for_results(self._app, self._deadline)
        timeout_s = self._options.timeout_us / 1e6
        breaker = self.breaker if self._may_fail_at_once(options) else None
        if breaker is not None:
            wait = breaker.admit(timeout_s or 60.0)
            if wait:
                raise BrokerUnavailable(
                    f"{call.name} was not sent: the broker has not answered lately ({breaker.last_error}), "
                    f"and is tried again in {wait:.1f} s; see dq_breaker_failures and dq_breaker_pause"
                )
        started = time.monotonic()
        try:
            sent = self._in_time(timeout_s, call, proceed)
        except BaseException as error:
            if breaker is not None:
                if self._blames_the_broker(error):
                    hung = bool(timeout_s) and time.monotonic() - started >= timeout_s / 3
                    breaker.failed(error, hung=hung)
                else:
                    breaker.abstained()
            raise
        if breaker is not None:
            breaker.succeeded()
        return sent

    @cached_property
    def _deadline(self) -> Deadline:
        return dq_of(self._app).deadline

    def _may_fail_at_once(self, options: dict[str, Any]) -> bool:
        chosen = options.get("producer")
        return (
            # Beat passes a producer.
            (chosen is None or type(chosen) is LazyPoolProducer)
            and not self._app.loader.worker_initialized
            and not in_task()
        )

    def _in_time(self, timeout_s: float, call: Call, proceed: Proceed) -> Any:
        options = call.options
        policy = options.get("retry_policy")
        patient = not policy and options.get("retry") is not False and self._must_not_be_lost()
        if policy or not (timeout_s or patient):
            # A retry policy of the caller wins.
            return proceed(call)
        deadline = self._deadline
        options["retry_policy"] = {"errback": deadline}
        if patient:
            options["retry_policy"]["max_retries"] = math.inf
            with deadline.never(f"{call.name}, which a running task sends,"):
                return proceed(call)
        with deadline.within(timeout_s * 2 / 3):
            return proceed(call)

    def _must_not_be_lost(self) -> bool:
        """Whether a running task makes the call, on a broker that keeps the task's message while it waits."""
        running = running_task()
        return running is not None and not running.request.get(FOLLOWS) and self._broker_is_ours

    @cached_property
    def _broker_is_ours(self) -> bool:
        return dq_of(self._app).serves_queues()

    def _blames_the_broker(self, error: BaseException) -> bool:
        if not isinstance(error, OperationalError):
            return False
        cause = error.__cause__
        return cause is None or isinstance(cause, (OperationalError, *self._connection_errors))

    @cached_property
    def _connection_errors(self) -> tuple[type[BaseException], ...]:
        connection = self._app.connection_for_write()
        return (OSError, *connection.connection_errors)
