"""Connections to publish on: no step of theirs waits for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery_dq.producer.errors import BrokerUnavailable

__all__ = ["AMQP", "Deadline", "punctual_connection"]

#: How the transports call the time that a socket may take; the rest have none, or times of their own.
REDIS = ("redis", "rediss", "sentinel", "dq-redis", "dq-rediss", "dq-sentinel", "dq-redis+socket")
AMQP = ("amqp", "amqps", "pyamqp")


class Deadline:
    """Until when a call may try again. Kombu calls it before each further attempt."""

    def __init__(self) -> None:
        self._latest: ContextVar[float | None] = ContextVar("dq_publish_deadline", default=None)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """No attempt of this thread (or greenlet, or coroutine) begins later than that."""
        token = self._latest.set(time.monotonic() + seconds)
        try:
            yield
        finally:
            self._latest.reset(token)

    def __call__(self, error: BaseException, interval: Any) -> None:
        """Raise BrokerUnavailable when it is too late; `interval` is what kombu would wait now."""
        latest = self._latest.get()
        if latest is not None and time.monotonic() >= latest:
            raise BrokerUnavailable(
                f"the broker did not answer within dq_publish_timeout: {str(error) or repr(error)}"
            ) from error

    def __repr__(self) -> str:
        # Kombu compares connections by the text of their options.
        return "<deadline of calls>"


def punctual_connection(app: Any, timeout_s: float, **kwargs: Any) -> Any:
    """A connection to publish on, where no step takes longer than `timeout_s`, unless the user has said so.

    :param timeout_s: seconds; 0 changes nothing.
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
