"""The arguments of queues, and a warning of those that the brokers of this package ignore."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from kombu.transport.base import to_rabbitmq_queue_arguments  # type: ignore[attr-defined]  # not in its stubs

__all__ = ["queue_arguments", "warn_of_ignored"]

#: Argument of RabbitMQ, its name in kombu's ``Queue``, and the remedy.
_IGNORED = (
    (
        "x-expires",
        "expires",
        "a queue that is kept is never deleted; give auto_delete=True as well, or delete it",
    ),
    ("x-message-ttl", "message_ttl", "give each message an expiration (in Celery, expires=…)"),
    ("x-max-length", "max_length", "nothing here bounds a queue"),
    ("x-max-length-bytes", "max_length_bytes", "nothing here bounds a queue"),
    ("x-dead-letter-exchange", "x-dead-letter-exchange", "see app.dq.dead_letters"),
)


def queue_arguments(arguments: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return RabbitMQ's arguments of a queue; kombu 5.5 drops the options on its virtual transports.

    Args:
        arguments: ``queue_arguments`` of kombu's ``Queue``.
        options: its ``expires``, ``message_ttl``, ``max_length``, ``max_length_bytes`` and ``max_priority``.
    """
    return dict(to_rabbitmq_queue_arguments(dict(arguments or {}), **options))


def warn_of_ignored(queue: str, arguments: Mapping[str, Any] | None) -> None:
    """Warn, once per process and queue, of arguments without an effect on an ordinary queue."""
    for argument, spelled, remedy in _IGNORED:
        value = (arguments or {}).get(argument)
        if value is not None:
            warnings.warn(
                f"Queue {queue!r} is declared with {spelled} = {value!r}, without effect here: {remedy}.",
                UserWarning,
                stacklevel=2,
            )
