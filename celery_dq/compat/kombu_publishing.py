"""Private names of kombu and py-amqp on the way of a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from celery_dq.compat.guard import check

check("kombu_publishing")


def publish_prepared(producer: Any) -> Callable[..., Any]:
    """Return the method of a producer (or of its class) that publishes a message which is prepared."""
    method: Callable[..., Any] = producer._publish
    return method


@contextmanager
def publishing_by(producer: Any, publish: Callable[..., Any]) -> Iterator[None]:
    """Give the prepared messages of a producer to `publish` for a while."""
    producer._publish = publish
    try:
        yield
    finally:
        del producer._publish


def library_errors(connection: Any) -> AbstractContextManager[Any]:
    """Raise the errors of the transport's library as kombu's ``OperationalError``, as a publish does."""
    errors: AbstractContextManager[Any] = connection._reraise_as_library_errors()
    return errors


def open_default_channel(connection: Any) -> Any:
    """Return the default channel if it is open; None otherwise. Opens nothing."""
    return connection._default_channel if connection.connected else None


def is_py_amqp(channel: Any) -> bool:
    """Whether the channel is one of py-amqp."""
    return hasattr(channel, "confirm_select") and hasattr(channel, "_basic_publish")


def publish_without_waiting(channel: Any) -> None:
    """Make ``basic_publish`` of a channel of py-amqp return before the broker has confirmed the message."""
    channel.basic_publish = channel._basic_publish
