"""Producers in the place of kombu's: one puts messages into the buffer, another one reports them.

Celery itself still does the routing, builds the message, and sends the signals and the ``task-sent`` event.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from kombu import Producer

__all__ = ["BufferingProducer", "Published", "RecordingProducer"]

#: Takes a message, its exchange, its routing key, and the entities to declare.
Published: TypeAlias = Callable[[dict[str, Any], str, str, Any], None]


class _Nowhere:
    """The connection of a buffering producer. It reaches no broker, so nothing on it can fail."""

    transport_options: dict[str, Any] = {}  # noqa: RUF012 - read only

    def _reraise_as_library_errors(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()


class BufferingProducer(Producer):
    """A producer without a channel.

    Args:
        accept: Called with the message, its exchange, its routing key, and the entities to declare.
    """

    def __init__(self, accept: Published) -> None:
        nowhere: Any = None
        super().__init__(nowhere, auto_declare=False)
        self._accept = accept

    @property
    def connection(self) -> Any:
        """The connection, whose error handling Celery wraps around a publish."""
        return _Nowhere()

    def publish(self, body: Any, *args: Any, **options: Any) -> None:
        """Build the message as kombu does, but without retries, because the flusher retries."""
        options["retry"] = False
        super().publish(body, *args, **options)

    def _publish(
        self,
        body: Any,
        priority: Any,
        content_type: Any,
        content_encoding: Any,
        headers: Any,
        properties: Any,
        routing_key: Any,
        mandatory: Any,
        immediate: Any,
        exchange: Any,
        declare: Any,
        *args: Any,
    ) -> None:
        # The form that kombu's virtual channels give a message. The sender for AMQP takes the same parts from
        # it.
        properties = dict(properties, delivery_info={}, priority=priority)
        reply_to = properties.get("reply_to")
        if hasattr(reply_to, "name"):
            properties["reply_to"] = reply_to.name
        message = {
            "body": body,
            "content-encoding": content_encoding,
            "content-type": content_type,
            "headers": headers or {},
            "properties": properties,
        }
        self._accept(message, exchange or "", routing_key or "", declare)


class RecordingProducer:
    """A producer that reports each published message.

    Args:
        producer: The producer that publishes.
        published: Called after each publish.
    """

    def __init__(self, producer: Any, published: Published) -> None:
        self._producer = producer
        self._published = published

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """Publish as kombu does, then report the message."""
        done = self._producer.publish(body, **options)
        BufferingProducer(self._published).publish(body, **options)
        return done
