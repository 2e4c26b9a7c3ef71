"""The stage for direct calls, which are not buffered: one deadline for all steps, and a circuit breaker.

Celery tries again after a lost connection, waits between attempts, and on some transports waits for an
answer for ever. Here every step has a third of ``dq_publish_timeout``, and no attempt begins in the last
third. After some calls in a row without an answer the next ones fail at once. The breaker does not apply to
calls of tasks and of beat: failing at once would break chains, or skip due times, during a short outage.

On the tenant broker a call of a running task has no deadline either: it is tried until the broker takes it.
The call may be a retry or the next task of a chain, and would be lost. While the broker is away no other
worker can claim the message of the running task, so the task may wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from kombu.exceptions import LimitExceeded, OperationalError
from kombu.pools import ProducerPool

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.awaited_producer import AwaitedProducer
from celery_dq.app.publishing.buffer_stage import LazyPoolProducer
from celery_dq.app.publishing.pipeline import Call, Proceed
from celery_dq.app.timeouts import Deadline, LimitedCall
from celery_dq.clock import Clock, SystemClock
from celery_dq.compat.celery_calls import calling_request
from celery_dq.compat.kombu_messages import default_channel, publish_prepared
from celery_dq.errors import TooFewReplicas
from celery_dq.per_process import OwnerProcess, current_pid
from celery_dq.producer.buffering_producer import BufferingProducer
from celery_dq.producer.sender import BrokerUnavailable
from celery_dq.protocols import FOLLOWS
from celery_dq.transport.packer import PackedMessage, StampedMessage
from celery_dq.transport.redis.store.publisher import may_wait_for_room, pauses_for_room
from celery_dq.transport.redis.store.server_errors import BacklogFull, MessageRefused, PushInterrupted
from celery_dq.transport.redis.transport import Channel

T = TypeVar("T")
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

    def _own_lock(self) -> threading.RLock:
        """Return the lock, in a forked child after forgetting what the parent has seen."""
        if self._owner.pid != current_pid():
            self._begin()
        return self._lock

    @property
    def state(self) -> CircuitState:
        """The present state."""
        if self._open_until is None or self._owner.pid != current_pid():
            return "closed"
        return "open" if self._clock.monotonic() < self._open_until else "half-open"

    def admit(self, within_s: float) -> float:
        """Ask for permission before a call. The caller reports the outcome of an admitted call.

        Args:
            within_s: Seconds after which a probe without an outcome no longer blocks the next probe.

        Returns:
            0 when the call is admitted; else the seconds until the next probe.
        """
        if self._open_until is None:
            return 0.0
        with self._own_lock():
            now = self._clock.monotonic()
            closed_at = max(self._open_until or 0.0, self._probing_until or 0.0)
            if now >= closed_at:
                self._probing_until = now + within_s
                return 0.0
            return closed_at - now

    def succeeded(self) -> None:
        """Report that the broker answered."""
        if self._failed or self._open_until is not None:
            with self._own_lock():
                self._failed, self._open_until, self._probing_until = 0, None, None

    def abstained(self) -> None:
        """Report that the call failed for a reason that says nothing about the broker."""
        if self._probing_until is not None:
            with self._own_lock():
                self._probing_until = None

    def failed(self, error: BaseException, *, hung: bool) -> None:
        """Report that the broker did not answer.

        Args:
            error: The error of the call.
            hung: Whether the call used up its timeout; one such call opens the breaker.
        """
        with self._own_lock():
            self.last_error = str(error) or repr(error)
            self._failed += 1
            self._probing_until = None
            if self._failures and (hung or self._failed >= self._failures or self._open_until is not None):
                self._open_until = self._clock.monotonic() + self._pause_s


class CallLimits(NamedTuple):
    """The limits of an awaited call.

    Attributes:
        breaker: The circuit breaker that has admitted the call; None without one.
        limited: Until when the call may be tried; None without a deadline.
        retry: Its option ``retry``.
        policy: Its option ``retry_policy``.
    """

    breaker: CircuitBreaker | None
    limited: LimitedCall | None
    retry: Any = None
    policy: dict[str, Any] | None = None

    def whole_policy(self, app: Any) -> dict[str, Any]:
        """Return the retry policy with the settings of the app, which are slow to read."""
        if app.conf.task_publish_retry if self.retry is None else self.retry:
            return retry_policy(app, self.policy)
        return {"max_retries": 0}


class DirectStage:
    """See the module.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        dq_of(app).circuit = lambda: self.breaker.state

    @cached_property
    def _timeout_s(self) -> float:
        """Seconds that all attempts of a call may take; 0 without a limit."""
        return float(dq_of(self._app).options.publishing.timeout_us) / 1e6

    @cached_property
    def breaker(self) -> CircuitBreaker:
        """The circuit breaker of this app."""
        options = dq_of(self._app).options.publishing
        return CircuitBreaker(options.breaker_failures, options.breaker_pause_us / 1e6, SystemClock())

    def send(self, call: Call, proceed: Proceed) -> Any:
        """See :class:`celery_dq.app.publishing.pipeline.Stage`.

        Raises:
            BrokerUnavailable: The broker does not answer, or did not answer the last calls.
        """
        options = call.options
        chosen = options.get("producer")
        # Any other look at the lazy one would acquire a producer, before the deadline begins.
        own = chosen is not None and type(chosen) is not LazyPoolProducer
        if call.producer is not None or (own and isinstance(chosen, BufferingProducer)):
            if isinstance(call.producer, AwaitedProducer) and call.producer.is_direct:
                call.producer.limits = self._admitted(call)
            return proceed(call)
        # A call of beat has a producer. Neither it nor a call of a task may fail at once.
        breaker = None if own or call.in_task or self._app.loader.worker_initialized else self.breaker
        guarded = partial(self._guarded, call.name, breaker, self._limit_of(call), proceed, call)
        if own:
            # Beat would stand still, and with it all other due times.
            token = may_wait_for_room.set(False)
            try:
                return guarded()
            finally:
                may_wait_for_room.reset(token)
        return _with_room(self._app, guarded)

    def send_plain(self, name: str, message: PackedMessage) -> bool:
        """Publish a packed message of a plain call, which no task makes, with the default options.

        Args:
            name: the name of the task.
            message: the message.

        Returns:
            Whether it was sent; False when kombu has to send it.

        Raises:
            BrokerUnavailable: The broker does not answer, or did not answer the last calls.
        """
        timeout_s, policy, limited = self._timeout_s, None, None
        if timeout_s:
            policy = self._policy
            limited = LimitedCall(time.monotonic() + timeout_s * 2 / 3)
        return self._guarded(name, self.breaker, limited, publish_direct, self._app, message, policy)

    def _guarded(
        self,
        name: str,
        breaker: CircuitBreaker | None,
        limited: LimitedCall | None,
        send: Callable[..., T],
        *arguments: Any,
    ) -> T:
        """Send a call within its limit, and report the outcome to the breaker."""
        if breaker is not None:
            wait_s = breaker.admit(self._timeout_s or 60.0)
            if wait_s:
                raise _refused(name, breaker, wait_s)
        started = time.monotonic()
        token = None if limited is None else self._deadline.call.set(limited)
        try:
            sent = send(*arguments)
        except BaseException as error:
            if breaker is not None:
                self._report(breaker, error, started)
            raise
        finally:
            if token is not None:
                self._deadline.call.reset(token)
        if breaker is not None:
            breaker.succeeded()
        return sent

    def _report(self, breaker: CircuitBreaker, error: BaseException, started: float) -> None:
        """Report the failure of a call that began at this monotonic time to the breaker."""
        timeout_s = self._timeout_s
        if isinstance(error, BacklogFull):
            breaker.succeeded()  # it was the answer
        elif self._blames_the_broker(error):
            breaker.failed(error, hung=bool(timeout_s) and time.monotonic() - started >= timeout_s / 3)
        else:
            breaker.abstained()

    def _admitted(self, call: Call) -> CallLimits:
        """Return the limits of an awaited call, which the breaker has admitted."""
        breaker = None if self._app.loader.worker_initialized else self.breaker
        if breaker is not None:
            wait_s = breaker.admit(self._timeout_s or 60.0)
            if wait_s:
                raise _refused(call.name, breaker, wait_s)
        limited = self._limit_of(call)
        return CallLimits(breaker, limited, call.options.get("retry"), call.options.get("retry_policy"))

    def plain_limits(self, name: str) -> CallLimits:
        """Return the limits of an awaited plain call, as :meth:`send_plain` has them.

        Args:
            name: the name of the task.

        Raises:
            BrokerUnavailable: The broker did not answer the last calls.
        """
        breaker, timeout_s = self.breaker, self._timeout_s
        wait_s = breaker.admit(timeout_s or 60.0)
        if wait_s:
            raise _refused(name, breaker, wait_s)
        if not timeout_s:
            return CallLimits(breaker, None)
        return CallLimits(breaker, LimitedCall(time.monotonic() + timeout_s * 2 / 3), None, self._policy)

    async def send_awaited(self, limits: CallLimits, send: Callable[[], Awaitable[None]]) -> None:
        """Await the exchange of a call that was admitted, and report the outcome to the breaker."""
        started = time.monotonic()
        try:
            await send()
        except BaseException as error:
            if limits.breaker is not None:
                self._report(limits.breaker, error, started)
            raise
        if limits.breaker is not None:
            limits.breaker.succeeded()

    @cached_property
    def _deadline(self) -> Deadline:
        return dq_of(self._app).deadline

    @cached_property
    def _policy(self) -> dict[str, Any]:
        return {"errback": self._deadline}

    def _limit_of(self, call: Call) -> LimitedCall | None:
        """Return until when a call may be tried, and set its retry policy; None without a limit."""
        options, timeout_s = call.options, self._timeout_s
        policy = options.get("retry_policy")
        retry = options.get("retry")
        retry = self._app.conf.task_publish_retry if retry is None else retry
        patient = not policy and retry and call.in_task and self._must_not_be_lost()
        if policy or not (timeout_s or patient):
            # A retry policy of the caller wins.
            return None
        options["retry_policy"] = dict(self._policy)
        if patient:
            options["retry_policy"]["max_retries"] = math.inf
            return LimitedCall(math.inf, f"{call.name}, which a running task sends,")
        return LimitedCall(time.monotonic() + timeout_s * 2 / 3)

    def _must_not_be_lost(self) -> bool:
        """Whether the broker keeps the message of the running task, which makes the call, while it waits."""
        request = calling_request()
        return request is not None and not request.get(FOLLOWS) and self._broker_is_ours

    @cached_property
    def _broker_is_ours(self) -> bool:
        return dq_of(self._app).serves_queues()

    def _blames_the_broker(self, error: BaseException) -> bool:
        if not isinstance(error, OperationalError):
            return False
        cause = error.__cause__
        if isinstance(cause, TooFewReplicas):
            # A master has answered, and others may have their replicas.
            return False
        if isinstance(error, MessageRefused) or (isinstance(cause, PushInterrupted) and cause.is_large):
            return False
        return cause is None or isinstance(cause, (OperationalError, *self._connection_errors))

    @cached_property
    def _connection_errors(self) -> tuple[type[BaseException], ...]:
        connection = self._app.connection_for_write()
        return (OSError, *connection.connection_errors)


def _refused(name: str, breaker: CircuitBreaker, wait_s: float) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{name} was not sent: the broker has not answered lately ({breaker.last_error}), "
        f"and is tried again in {wait_s:.1f} s; see dq_breaker_failures and dq_breaker_pause"
    )


def publish_by_kombu(app: Any, policy: dict[str, Any], *prepared: Any) -> None:
    """Publish a prepared message on a producer of the app's pool.

    Args:
        app: a Celery app.
        policy: the whole retry policy of the call.
        prepared: the arguments of kombu's ``Producer._publish``.
    """
    with app.producer_or_acquire() as producer:
        producer.connection.transport_options.update(policy)
        producer.connection.ensure(producer, publish_prepared(producer), **policy)(*prepared)


def publish_direct(
    app: Any,
    message: PackedMessage,
    policy: dict[str, Any] | None = None,
    stamped: StampedMessage | None = None,
) -> bool:
    """Publish a packed message on a connection of the app's pool; return False when kombu has to publish it.

    Args:
        app: a Celery app whose broker is one of celery-dq.
        message: the message.
        policy: the retry policy of the call, which adds to the one of the app; None for the latter.
        stamped: the message with its stamp, when it may have been sent before; None otherwise.

    Raises:
        BacklogFull: There was no room for the message, also after a wait if its quota says so.
    """
    pool = app.amqp.producer_pool
    if type(pool) is not ProducerPool:
        return False
    # Another attempt after a refusal may get another number, because the message is not stored.
    stamps = chain((stamped,), repeat(None))
    return _with_room(app, lambda: _publish_on(pool, app, message, policy, next(stamps)))


def _with_room(app: Any, attempt: Callable[[], T]) -> T:
    """Make a call again until its tenant has room, if its quota lets it wait, and its time is not over.

    Between two attempts, other calls have the connection.

    Raises:
        BacklogFull: There was no room.
    """
    may_wait = may_wait_for_room.get()
    pauses = refused = None
    while True:
        token = may_wait_for_room.set(False)
        try:
            return attempt()
        except BacklogFull as error:
            if not (may_wait and error.waits):
                raise
            pauses = pauses or pauses_for_room(dq_of(app).options, SystemClock())
            pause_s = next(pauses, None)
            if pause_s is None:
                raise
            refused = error
        except BrokerUnavailable as error:
            if refused is not None and isinstance(error.__cause__, LimitExceeded):
                raise refused from None  # its time was over before it had a connection again
            raise
        finally:
            may_wait_for_room.reset(token)
        time.sleep(pause_s)


def _publish_on(
    pool: ProducerPool,
    app: Any,
    message: PackedMessage,
    policy: dict[str, Any] | None,
    stamped: StampedMessage | None,
) -> bool:
    connection = pool.connections.acquire(block=True)
    try:
        published = _Publish(message, stamped)
        if not published.on_open(default_channel(connection) if connection.connected else None):
            published.with_retries(connection, retry_policy(app, policy))
        return published.is_sent
    except BacklogFull:
        raise  # it was the answer
    except BaseException:
        # A pooled producer replaces its connection in the same way.
        pool.connections.replace(connection)
        raise
    finally:
        connection.release()


def retry_policy(app: Any, policy: dict[str, Any] | None) -> dict[str, Any]:
    """Return how often to retry a call with this policy, see Celery's ``task_publish_retry_policy``."""
    return dict(app.conf.task_publish_retry_policy or {}, **(policy or {}))


@dataclass(slots=True, eq=False)
class _Publish:
    """The publish of one message; kombu's ``ensure`` gives it a new channel after a reconnect.

    Attributes:
        is_sent: Whether it was sent; False when kombu has to send it.
    """

    _message: PackedMessage
    _stamped: StampedMessage | None = None
    _failed: Exception | None = None
    _channel: Any = None
    is_sent: bool = False

    def revive(self, channel: Any) -> None:
        """Take the channel of a new connection; kombu calls it."""
        self._channel = channel

    def on(self, channel: Any) -> None:
        """Publish on this channel. All attempts have the first stamp, so the broker stores one copy."""
        queue = self._message.queue
        if type(channel).basic_publish is not Channel.basic_publish or (
            queue not in channel.transients.durable and channel.is_transient(queue)
        ):
            return
        if self._stamped is None:
            self._stamped = channel.publisher.number(self._message)
        channel.publisher.push([self._stamped])
        self.is_sent = True

    def on_open(self, channel: Any) -> bool:
        """Use the open channel, if there is one, without kombu's wrapper; return whether it did not fail."""
        if channel is None or channel.closed:
            return False
        try:
            self.on(channel)
        except BacklogFull:
            raise  # it was the answer
        except Exception as exc:
            self._failed = exc
            return False
        return True

    def with_retries(self, connection: Any, policy: dict[str, Any]) -> None:
        """Publish with kombu's retries, of which a failed attempt on the open channel was the first.

        Raises:
            kombu.exceptions.OperationalError: The message could not be sent.
        """

        def attempt() -> None:
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
            self.on(connection.default_channel if self._channel is None else self._channel)

        connection.transport_options.update(policy)
        connection.ensure(self, attempt, **policy)()
