"""One log line when a server stops answering, and one when it answers again."""

from __future__ import annotations

import logging
import threading

from celery_dq.clock import Clock, SystemClock

__all__ = ["Outage"]


class Outage:
    """Whether a server answers. Code that repeats a request logs its failures through this. Thread-safe.

    Args:
        logger: Logger of the calling module.
        event: Prefix of the event names of the two records, which end with ``_began`` and ``_over``.
        clock: Measures the length of the outage; default the clocks of this machine.
    """

    def __init__(self, logger: logging.Logger, event: str, clock: Clock | None = None) -> None:
        self._logger = logger
        self._event = event
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._since: float | None = None

    @property
    def lasts(self) -> bool:
        """Whether the last request got no answer."""
        return self._since is not None

    def began(self, message: str, *args: object, exc_info: BaseException | None = None) -> bool:
        """Record a request without an answer. The first one of an outage is logged.

        Args:
            message: Message of the log record, with `args` for its placeholders.
            args: Values of the placeholders.
            exc_info: Exception for the log record.

        Returns:
            Whether this request began an outage.
        """
        with self._lock:
            if self._since is not None:
                return False
            self._since = self._clock.monotonic()
        self._logger.warning(message, *args, exc_info=exc_info, extra={"event": f"{self._event}_began"})
        return True

    def over(self, message: str, *args: object) -> bool:
        """Record an answer. If it ends an outage, the message and the length of the outage are logged.

        Args:
            message: Message of the log record, with `args` for its placeholders.
            args: Values of the placeholders.

        Returns:
            Whether this answer ended an outage.
        """
        with self._lock:
            if self._since is None:
                return False
            lasted_s, self._since = self._clock.monotonic() - self._since, None
        self._logger.warning(
            message + " The outage lasted %.1f s.", *args, lasted_s, extra={"event": f"{self._event}_over"}
        )
        return True
