"""A producer that reports each published message, from which a message template is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_dq.producer.buffering_producer import BufferingProducer

__all__ = ["LEARN_OPTION", "RecordingProducer"]

#: The option with which a call of ``send_task`` passes the callback for its message to the task sender.
LEARN_OPTION = "dq_learn"


class RecordingProducer:
    """A producer that reports each published message.

    Args:
        producer: the producer that publishes.
        published: called after a publish with the message, its exchange, its routing key and the entities
            that were declared.
    """

    def __init__(self, producer: Any, published: Callable[[dict[str, Any], str, str, Any], None]) -> None:
        self._producer = producer
        self._published = published

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """Publish as kombu does, then call the callback."""
        done = self._producer.publish(body, **options)
        BufferingProducer(self._published).publish(body, **options)
        return done
