"""Calls that go to the broker at once: one deadline for all that happens, and a circuit breaker.

Celery tries again after a lost connection, waits in between, and on some transports waits for an answer for
ever. Here every step has a third of ``dq_publish_timeout``, no attempt begins in the last third, and when the
broker has not answered some calls in a row the next ones fail at once. What a task publishes is only given
the deadline: to fail at once would break chains that a moment later would go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from kombu.exceptions import OperationalError

from celery_dq.app.face import dq_of
from celery_dq.app.fast_calls import in_task
from celery_dq.clock import SystemClock
from celery_dq.options.publishing import PublishingOptions
from celery_dq.producer.circuit_breaker import CircuitBreaker
from celery_dq.producer.errors import BrokerUnavailable
from celery_dq.producer.stand_in import StandIn

__all__ = ["DirectCalls"]


class DirectCalls:
    """Stands before the app's ``send_task``, behind the buffer.

    :param app: a Celery app.
    :param send_task: its own.
    """

    def __init__(self, app: Any, send_task: Callable[..., Any]) -> None:
        self._app = app
        self._send_task = send_task

    @cached_property
    def _options(self) -> PublishingOptions:
        options: PublishingOptions = dq_of(self._app).options.publishing
        return options

    @cached_property
    def breaker(self) -> CircuitBreaker:
        """The breaker of this app."""
        options = self._options
        return CircuitBreaker(options.breaker_failures, options.breaker_pause_us / 1e6, SystemClock())

    def __call__(self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send a task by name; see Celery's ``send_task``.

        Raises:
            BrokerUnavailable: The broker does not answer, or has not lately.
        """
        if isinstance(options.get("producer"), StandIn) or self._app.conf.task_always_eager:
            return self._send_task(name, args, kwargs, *more, **options)
        timeout_s = self._options.timeout_us / 1e6
        breaker = None if self._app.loader.worker_initialized or in_task() else self.breaker
        if breaker is not None:
            wait = breaker.admit(timeout_s or 60.0)
            if wait:
                raise BrokerUnavailable(
                    f"{name} was not sent: the broker has not answered lately ({breaker.last_error}), and is "
                    f"tried again in {wait:.1f} s; see dq_breaker_failures and dq_breaker_pause"
                )
        started = time.monotonic()
        try:
            sent = self._in_time(timeout_s, name, args, kwargs, more, options)
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

    def _in_time(
        self,
        timeout_s: float,
        name: str,
        args: Any,
        kwargs: Any,
        more: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        policy = options.get("retry_policy")
        if not timeout_s or policy:
            # Somebody who says how often it is to be tried means it.
            return self._send_task(name, args, kwargs, *more, **options)
        deadline = dq_of(self._app).deadline
        options["retry_policy"] = {"errback": deadline}
        with deadline.within(timeout_s * 2 / 3):
            return self._send_task(name, args, kwargs, *more, **options)

    def _blames_the_broker(self, error: BaseException) -> bool:
        if not isinstance(error, OperationalError):
            return False
        cause = error.__cause__
        return cause is None or isinstance(cause, (OperationalError, *self._connection_errors))

    @cached_property
    def _connection_errors(self) -> tuple[type[BaseException], ...]:
        connection = self._app.connection_for_write()
        return (OSError, *connection.connection_errors)
