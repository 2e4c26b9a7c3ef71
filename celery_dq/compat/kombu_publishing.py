"""Private names of kombu and py-amqp on the way of a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kombu import serialization
from kombu.utils import json as kombu_json

from celery_dq.compat.guard import check

check("kombu_publishing")

_registry: Any = serialization.registry  # type: ignore[attr-defined]  # not in its stubs


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


def json_encoder_is_kombus() -> bool:
    """Whether the serializer ``json`` is still the one that kombu registers."""
    codec = _registry._encoders.get("json")
    return codec is not None and codec.encoder is kombu_json.dumps


def json_decoder_is_kombus() -> bool:
    """Whether the decoder of JSON is still the one that kombu registers, and JSON is not disabled."""
    json = "application/json"
    return _registry._decoders.get(json) is kombu_json.loads and json not in _registry._disabled_content_types


def is_py_amqp(channel: Any) -> bool:
    """Whether the channel is one of py-amqp."""
    return hasattr(channel, "confirm_select") and hasattr(channel, "_basic_publish")


def publish_without_waiting(channel: Any) -> None:
    """Make ``basic_publish`` of a channel of py-amqp return before the broker has confirmed the message."""
    channel.basic_publish = channel._basic_publish
