"""Stands where Celery expects a kombu producer, and puts what it is told to publish into the buffer.

Everything before that is Celery's own: routing, the message, the signals, the ``task-sent`` event.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kombu import Producer

__all__ = ["StandIn"]


class _Nowhere:
    """The connection of a stand-in: there is none, so nothing on it can fail."""

    transport_options: dict[str, Any] = {}  # noqa: RUF012 - read only

    def _reraise_as_library_errors(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()


class StandIn(Producer):
    """A producer without a channel.

    :param accept: called with the message, its exchange, its routing key, and what to declare.
    """

    def __init__(self, accept: Callable[[dict[str, Any], str, str, Any], None]) -> None:
        nowhere: Any = None
        super().__init__(nowhere, auto_declare=False)
        self._accept = accept

    @property
    def connection(self) -> Any:
        """What Celery wraps a publish in."""
        return _Nowhere()

    def publish(self, body: Any, *args: Any, **options: Any) -> None:
        """Build the message as kombu does, without the retries: those are the flusher's business."""
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
        # What kombu's virtual channels make of a message; the AMQP ones get the same parts later.
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
