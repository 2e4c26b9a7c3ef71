"""Private names of kombu and py-amqp on the way of a message, out and in.

Only if kombu's own functions write and read JSON, a quicker encoder writes the same bytes, and a quicker
decoder reads the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

from kombu import serialization
from kombu.utils import json as kombu_json

from celery_dq.compat.guard import check

check("kombu_messages")

_registry: Any = serialization.registry  # type: ignore[attr-defined]  # not in its stubs

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


def json_encoder_is_kombus() -> bool:
    """Whether the serializer ``json`` is still the one that kombu registers."""
    codec = _registry._encoders.get("json")
    return codec is not None and codec.encoder is kombu_json.dumps


def json_decoder_is_kombus() -> bool:
    """Whether the decoder of JSON is still the one that kombu registers, and JSON is not disabled."""
    json = "application/json"
    return _registry._decoders.get(json) is kombu_json.loads and json not in _registry._disabled_content_types
