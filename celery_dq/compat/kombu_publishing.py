"""Private names of kombu and py-amqp on the way of a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

from celery_dq.compat.guard import check

check("kombu_publishing")


#: Returns the method of a producer (or of its class) that publishes a message which is prepared.
publish_prepared: Callable[[Any], Callable[..., Any]] = attrgetter("_publish")

#: Returns the default channel of a connection that is connected; None if it has none. Opens nothing.
default_channel: Callable[[Any], Any] = attrgetter("_default_channel")


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


def is_py_amqp(channel: Any) -> bool:
    """Whether the channel is one of py-amqp."""
    return hasattr(channel, "confirm_select") and hasattr(channel, "_basic_publish")


def publish_without_waiting(channel: Any) -> None:
    """Make ``basic_publish`` of a channel of py-amqp return before the broker has confirmed the message."""
    channel.basic_publish = channel._basic_publish
