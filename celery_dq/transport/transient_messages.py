"""Messages of transient queues and broadcasts: remote control, events, replies.

Celery's receivers of these raise what their content causes, and a dead letter would help no one. A worker
logs one that it cannot handle, and goes on. A program gets the error of its own receiver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_dq.errors import described
from celery_dq.shown import shown_logger

__all__ = ["handle_transient"]

logger = shown_logger(__name__)


def handle_transient(
    handle: Callable[[], Any], source: str, *, in_worker: bool, passing: tuple[type[BaseException], ...]
) -> Any:
    """Decode and handle a message.

    Args:
        handle: Decodes the message, and calls its receivers.
        source: Name of its queue, or a word for the broadcasts.
        in_worker: Whether this process is a worker.
        passing: Errors of the connection, which are raised.

    Returns:
        The result of `handle`; True for a message that was passed over.
    """
    try:
        return handle()
    except passing:
        raise
    except Exception as error:
        if not in_worker:
            raise
        logger.error(
            "A message of %s could not be handled, and is dropped: %s. Look for a program other than Celery "
            "that publishes there.",
            source,
            described(error),
            extra={"event": "transient_message_dropped"},
        )
        return True
