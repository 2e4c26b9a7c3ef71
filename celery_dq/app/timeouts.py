"""Time limits of a publish: the deadline of a call, and connections whose steps have a timeout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from celery_dq.compat.kombu_messages import publish_prepared
from celery_dq.errors import TooFewReplicas
from celery_dq.lost_attempts import MOST_LOSSES, MOST_SMALL_LOSSES, LostAttempts
from celery_dq.producer.sender import BrokerUnavailable
from celery_dq.shown import shown_logger
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.redis.store.server_errors import BrokerOverloaded, PushInterrupted, message_refused

#: Transports by the names of their socket timeout options. Other transports have no such option.
REDIS = ("redis", "rediss", "sentinel", *TENANT_SCHEMES, "dq-redis+socket")
AMQP = ("amqp", "amqps", "pyamqp")


logger = shown_logger(__name__)

#: First and longest pause, in seconds, after a server has refused a message that waits.
FIRST_REFUSED_S = 0.1
LAST_REFUSED_S = 1.0


@dataclass
class LimitedCall:
    """One call that is being published.

    Attributes:
        latest: monotonic time after which no attempt begins; infinite without a limit.
        what: the call in words for the log, which names it once; empty afterwards.
        losses: the attempts that have lost their connections; None before the first failure.
    """

    latest: float
    what: str = ""
    losses: LostAttempts | None = None


class Deadline:
    """The time until which a call may try again. Kombu calls it before each further attempt."""

    def __init__(self) -> None:
        #: The call that this thread (or greenlet, or coroutine) publishes; None without one.
        self.call: ContextVar[LimitedCall | None] = ContextVar("dq_publish_deadline", default=None)

    def __call__(self, error: BaseException, interval: Any) -> None:
        """Check the deadline before kombu's next attempt.

        Args:
            error: the error of the last attempt.
            interval: seconds that kombu would wait now.

        Raises:
            BrokerUnavailable: The deadline is over.
            TooFewReplicas: The message is stored, but too few replicas have it. Another attempt would only
                wait for them again, so a call with a deadline makes none.
            MessageRefused: The message loses each connection on which it is sent.
        """
        call = self.call.get()
        pause_s = 0.0 if call is None else self.pause_s(call, error)
        if pause_s:
            time.sleep(pause_s)

    def pause_s(self, call: LimitedCall, error: BaseException) -> float:
        """Return the pause in seconds before the next attempt of a call; raise when there is none.

        The errors are those of a call of the deadline.

        Args:
            call: the call.
            error: the error of its last attempt.
        """
        if isinstance(error, TooFewReplicas) and call.latest < math.inf:
            raise error
        losses = call.losses = call.losses or LostAttempts()
        if not isinstance(error, PushInterrupted):
            losses.broker_failed()
        elif losses.lost(MOST_LOSSES if error.is_large else MOST_SMALL_LOSSES):
            raise message_refused(error, losses.count) from error
        if time.monotonic() >= call.latest:
            raise BrokerUnavailable(
                f"the broker did not answer within dq_publish_timeout: {str(error) or repr(error)}"
            ) from error
        _report_that_it_waits(call, error)
        return max(min(losses.pause_s, call.latest - time.monotonic()), 0.0)

    def publisher_that_waits(self, producer: Any, policy: dict[str, Any]) -> Callable[..., Any]:
        """Return a function that publishes a prepared message of a running task, however long it takes.

        Kombu tries again when a connection is lost. It does not when the server refuses the message, or
        refuses to be connected to, because it is full, lacks replicas or cannot save.

        Args:
            producer: a kombu producer.
            policy: its retry policy, without a limit.
        """
        publish = publish_prepared(producer)

        def publish_patiently(*prepared: Any) -> Any:
            pause_s = FIRST_REFUSED_S
            while True:
                try:
                    # The message keeps its stamp from one round to the next, so it is stored once.
                    return producer.connection.ensure(producer, publish, **policy)(*prepared)
                except BrokerOverloaded as error:  # noqa: PERF203 - a broker that takes it ends the loop
                    call = self.call.get()
                    if call is None:
                        raise
                    call.losses = None
                    _report_that_it_waits(call, error)
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 2, LAST_REFUSED_S)

        return publish_patiently

    def __repr__(self) -> str:
        # Kombu compares connections by the text of their options.
        return "<deadline of calls>"


def _report_that_it_waits(call: LimitedCall, error: BaseException) -> None:
    if call.what:
        logger.warning(
            "%s waits for the broker (%s), and is tried until the broker takes it.",
            call.what,
            error,
            extra={"event": "publish_waits_for_broker"},
        )
        call.what = ""


@contextmanager
def unchanged_attempts(connection: Any) -> Iterator[None]:
    """Restore ``max_retries`` of *connection* afterwards: kombu copies a call's policy into its options."""
    options = connection.transport_options
    before = {name: options[name] for name in ("max_retries",) if name in options}
    try:
        yield
    finally:
        options.pop("max_retries", None)
        options.update(before)


def connection_with_timeout(app: Any, timeout_s: float, **kwargs: Any) -> Any:
    """Make a connection to publish on, whose steps take at most `timeout_s`.

    A socket timeout that the user has set stays.

    Args:
        app: a Celery app.
        timeout_s: seconds; 0 changes nothing.
        kwargs: arguments of ``app.connection_for_write``.

    Returns:
        A kombu connection, not yet connected.
    """
    made = app.connection_for_write(**kwargs)
    if not timeout_s:
        return made
    if made.transport_cls in REDIS:
        for name in ("socket_timeout", "socket_connect_timeout"):
            made.transport_options.setdefault(name, timeout_s)
    elif made.transport_cls in AMQP:
        for name in ("read_timeout", "write_timeout"):
            made.transport_options.setdefault(name, timeout_s)
        made.connect_timeout = min(made.connect_timeout or timeout_s, timeout_s)
    return made
