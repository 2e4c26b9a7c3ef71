"""A producer that tells what it published, so that a call that goes Celery's way can be learnt from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_dq.producer.stand_in import StandIn

__all__ = ["LEARN_OPTION", "Watched"]

#: The option with which a call of ``send_task`` hands what wants to see its message down to the task sender.
LEARN_OPTION = "dq_learn"


class Watched:
    """A producer that tells what it published.

    :param producer: the one that publishes.
    :param published: called afterwards with the message, its exchange, its routing key and what it declared.
    """

    def __init__(self, producer: Any, published: Callable[[dict[str, Any], str, str, Any], None]) -> None:
        self._producer = producer
        self._published = published

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """Publish, as kombu does."""
        done = self._producer.publish(body, **options)
        StandIn(self._published).publish(body, **options)
        return done
