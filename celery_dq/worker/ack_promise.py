"""The promise with which Celery acknowledges or rejects a message."""

from __future__ import annotations

import logging
from typing import Any

from vine import promise

from celery_dq.transport.in_flight.message import Message

__all__ = ["ack_promise"]

logger = logging.getLogger(__name__)


class AckPromise(promise):
    """The promise to acknowledge or reject a message of this package."""

    def throw(self, exc: BaseException | None = None, tb: Any = None, propagate: bool = True) -> None:
        """Log the error of the ack, which vine passes to ``on_error`` only."""
        answer: Any = self.fun
        message: Message = answer.__self__
        logger.error(
            "The ack or reject of message %s of queue %s failed. If it was recorded, it is sent again; "
            "otherwise the message may be delivered again after the end of this worker.",
            message.message_id,
            message.queue,
            exc_info=exc or True,
            extra={"event": "ack_failed", "queue": message.queue},
        )
        super().throw(exc, tb, propagate)


def ack_promise(call_soon: Any, args: tuple[Any, ...], **options: Any) -> Any:
    """Return Celery's promise to acknowledge or reject a message, which a message of ours does at once.

    Celery passes the answer to its event loop, because other transports write to their connection. Here an
    ack is recorded for the next script, from any thread. Celery may drop it when a connection breaks.

    Args:
        call_soon: Celery's function that passes an ack to its event loop.
        args: The method that acknowledges or rejects. Another library may have replaced it by a function,
            which is called in Celery's way.
        **options: Further arguments of the promise.
    """
    (answer,) = args
    if isinstance(getattr(answer, "__self__", None), Message):
        return AckPromise(answer, **options)
    return promise(call_soon, args, **options)
