"""The stage for direct calls, which are not buffered: one deadline for all steps, and a circuit breaker.

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
import threading
import time
from functools import cached_property
from typing import Any, Literal, TypeAlias

from kombu.exceptions import OperationalError

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.buffer_stage import LazyPoolProducer
from celery_dq.app.publishing.pipeline import Call, Proceed
from celery_dq.app.timeouts import Deadline, LimitedCall
from celery_dq.clock import Clock, SystemClock
from celery_dq.compat.celery_calls import running_task
from celery_dq.options.publishing import PublishingOptions
from celery_dq.per_process import OwnerProcess, current_pid
from celery_dq.producer.buffering_producer import BufferingProducer
from celery_dq.producer.errors import BrokerUnavailable
from celery_dq.protocols import FOLLOWS

__all__ = ["CircuitBreaker", "DirectStage"]


CircuitState: TypeAlias = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """Lets calls to a broker that does not answer fail at once. Pure except for its clock.

    A *closed* breaker admits each call. After a number of failures in a row, or one call that used up its
    timeout, the breaker is *open* and calls fail at once. After a pause one call, the *probe*, is admitted.
    Its success closes the breaker, its failure starts another pause.

    Thread-safe; a forked child begins with a closed breaker.

    Args:
        failures: Number of failures in a row that opens the breaker; 0 never opens it.
        pause_s: Seconds for which it stays open.
        clock: Its monotonic time measures the pause.
    """

    def __init__(self, failures: int, pause_s: float, clock: Clock) -> None:
        self._failures = failures
        self._pause_s = pause_s
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._owner = OwnerProcess()
        # Re-entrant, because a destructor that runs under the lock may publish too.
        self._lock = threading.RLock()
        self._failed = 0
        self._open_until: float | None = None
        self._probing_until: float | None = None
        self.last_error = ""

    @property
    def state(self) -> CircuitState:
        """The present state."""
        if self._open_until is None:
            return "closed"
        return "open" if self._clock.monotonic() < self._open_until else "half-open"

    def admit(self, within_s: float) -> float:
        """Ask for permission before a call. The caller reports the outcome of an admitted call.

        Args:
            within_s: Seconds after which a probe without an outcome no longer blocks the next probe.

        Returns:
            0 when the call is admitted; else the seconds until the next probe.
        """
        if self._owner.pid != current_pid():
            self._begin()
        if self._open_until is None:
            return 0.0
        with self._lock:
            now = self._clock.monotonic()
            closed_at = max(self._open_until or 0.0, self._probing_until or 0.0)
            if self._open_until is None or now >= closed_at:
                self._probing_until = now + within_s
                return 0.0
            return closed_at - now

    def succeeded(self) -> None:
        """Report that the broker answered."""
        if self._failed or self._open_until is not None:
            with self._lock:
                self._failed, self._open_until, self._probing_until = 0, None, None

    def abstained(self) -> None:
        """Report that the call failed for a reason that says nothing about the broker."""
        if self._probing_until is not None:
            with self._lock:
                self._probing_until = None

    def failed(self, error: BaseException, *, hung: bool) -> None:
        """Report that the broker did not answer.

        Args:
            error: The error of the call.
            hung: Whether the call used up its timeout; one such call opens the breaker.
        """
        with self._lock:
            self.last_error = str(error) or repr(error)
            self._failed += 1
            self._probing_until = None
            if self._failures and (hung or self._failed >= self._failures or self._open_until is not None):
                self._open_until = self._clock.monotonic() + self._pause_s


class DirectStage:
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
        chosen = options.get("producer")
        if call.producer is not None or isinstance(chosen, BufferingProducer):
            return proceed(call)
        timeout_s = self._options.timeout_us / 1e6
        # A call of beat has a producer. Neither it nor a call of a task may fail at once.
        own = chosen is not None and type(chosen) is not LazyPoolProducer
        breaker = None if own or call.in_task or self._app.loader.worker_initialized else self.breaker
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

    def _in_time(self, timeout_s: float, call: Call, proceed: Proceed) -> Any:
        options = call.options
        policy = options.get("retry_policy")
        patient = (
            not policy and call.in_task and options.get("retry") is not False and self._must_not_be_lost()
        )
        if policy or not (timeout_s or patient):
            # A retry policy of the caller wins.
            return proceed(call)
        deadline = self._deadline
        options["retry_policy"] = {"errback": deadline}
        if patient:
            options["retry_policy"]["max_retries"] = math.inf
            limited = LimitedCall(math.inf, f"{call.name}, which a running task sends,")
        else:
            limited = LimitedCall(time.monotonic() + timeout_s * 2 / 3)
        token = deadline.call.set(limited)
        try:
            return proceed(call)
        finally:
            deadline.call.reset(token)

    def _must_not_be_lost(self) -> bool:
        """Whether the broker keeps the message of the running task, which makes the call, while it waits."""
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
