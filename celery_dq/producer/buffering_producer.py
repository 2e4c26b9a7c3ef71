"""Producers in the place of kombu's: one puts messages into the buffer, another one reports them.

Celery itself still does the routing, builds the message, and sends the signals and the ``task-sent`` event.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeAlias

from kombu import Producer

from celery_dq.compat.kombu_messages import publish_prepared, publishing_by
from celery_dq.producer.sender import Addressed

__all__ = ["NOWHERE", "BufferingProducer", "Published", "RecordingProducer", "message_of"]

#: Takes a message, its exchange, its routing key, and the entities to declare.
Published: TypeAlias = Callable[[dict[str, Any], str, str, Any], None]


class _Nowhere:
    """The connection of a buffering producer. It reaches no broker, so nothing on it can fail."""

    transport_options: dict[str, Any] = {}  # noqa: RUF012 - read only
    #: Celery 5.7 reads them when it sends a callback.
    recoverable_connection_errors = ()

    #: The scheme of the broker that answers for the producer; "" when no answer is awaited.
    transport_cls = ""

    def __init__(self, driver_type: str) -> None:
        #: Monitoring tools read the kind of broker here.
        self.transport = SimpleNamespace(driver_type=driver_type)

    def _reraise_as_library_errors(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()


#: The connection of a producer of this broker whose calls await no answer.
NOWHERE = _Nowhere("redis")


class BufferingProducer(Producer):
    """A producer without a channel.

    Args:
        address: Packs a message, see :meth:`celery_dq.producer.sender.Sender.address`.
        put: Called with each packed message: keeps it until it is sent.
        driver_type: The kind of broker for monitoring tools, as kombu's ``Transport.driver_type``.
    """

    def __init__(
        self,
        address: Callable[[dict[str, Any], str, str, Any], Addressed],
        put: Callable[[Addressed], Any],
        driver_type: str = "",
    ) -> None:
        nowhere: Any = None
        super().__init__(nowhere, auto_declare=False)
        self.address = address
        self.put = put
        self._nowhere = _Nowhere(driver_type)

    @property
    def connection(self) -> Any:
        """The connection, whose error handling Celery wraps around a publish."""
        return self._nowhere

    def publish(self, body: Any, *args: Any, **options: Any) -> None:
        """Build the message as kombu does, but without retries, because the flusher retries."""
        options["retry"] = False
        super().publish(body, *args, **options)

    def _publish(self, *prepared: Any) -> None:
        self.put(self.address(*message_of(*prepared)))


def message_of(
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
) -> tuple[dict[str, Any], str, str, Any]:
    """Return the arguments of kombu's ``Producer._publish`` in the form that :data:`Published` takes."""
    # The form that kombu's virtual channels give a message. The sender for AMQP takes the same parts from it.
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
    return message, exchange or "", routing_key or "", declare


class RecordingProducer:
    """A producer that reports the first message that it publishes. Another one is the event of this message.

    Args:
        producer: The producer that publishes: one of the pool, or the buffer's.
        published: Called after the publish.
    """

    def __init__(self, producer: Any, published: Published) -> None:
        # The buffer's producer is shared by threads, so this call gets one of its own.
        own = type(producer) is BufferingProducer
        self._producer: Any = BufferingProducer(producer.address, producer.put) if own else producer
        self._published: Published | None = published

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """Publish as the producer does, then report the message."""
        producer, published = self._producer, self._published
        if published is None:
            return producer.publish(body, **options)
        self._published = None
        publish = publish_prepared(producer)

        def publish_and_report(*prepared: Any) -> Any:
            message = message_of(*prepared)
            done = publish(*prepared)
            published(*message)
            return done

        # Not by a second call of `publish`, which a monitoring tool may observe.
        with publishing_by(producer, publish_and_report):
            return producer.publish(body, **options)
