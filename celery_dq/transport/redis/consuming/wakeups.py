"""Waits for a *wake-up* of any queue that a channel consumes: one ``BLPOP`` on a connection of its own."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from celery_dq.transport.redis.store.pipelined_connection import (
    BLPOP_TIMEOUT_S,
    OVERDUE_S,
    PipelinedConnection,
)
from celery_dq.transport.redis.store.queue import Queue


class WakeupListener:
    """Wait of one channel for wake-ups.

    Args:
        pool: Pool that the connection is taken from.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self.connection = PipelinedConnection(pool)
        #: Monotonic start of the current wait; None without one.
        self.waiting_since: float | None = None
        self._queues: dict[bytes, str] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a ``BLPOP`` is under way, so that this channel may receive a wake-up."""
        return self.waiting_since is not None

    def start_wait(self, queues: Iterable[Queue], now: float) -> None:
        """Start to wait for a wake-up of any of these queues.

        Args:
            queues: The consumed queues.
            now: Monotonic time.

        Raises:
            redis.RedisError: The connection broke.
        """
        self._queues = {queue.partition.keys.wake.encode(): queue.name for queue in queues}
        self.connection.open()
        self.connection.send(("BLPOP", *self._queues, BLPOP_TIMEOUT_S))
        self.waiting_since = now

    def check_alive(self, now: float) -> None:
        """Check that Redis answers the wait in time.

        Args:
            now: Monotonic time.

        Raises:
            redis.ConnectionError: The answer is overdue.
        """
        silent_s = 0.0 if self.waiting_since is None else now - self.waiting_since
        # An unread answer means that this process was busy, not that the connection is dead.
        if silent_s > BLPOP_TIMEOUT_S + OVERDUE_S and not self.connection.has_unread_input():
            raise redis.ConnectionError(
                f"Redis has not answered a BLPOP for {silent_s:.0f} s: the connection is dead"
            )

    def read_wakeup(self) -> str | None:
        """Read the answer of the wait.

        Returns:
            The name of the queue whose wake-up has come; None after a wait without a wake-up.

        Raises:
            redis.RedisError: The connection broke, or the answer is an error.
        """
        answer = self.connection.read()
        self.waiting_since = None
        if answer is None:
            return None
        key = answer[0]
        return self._queues.get(key.encode() if isinstance(key, str) else bytes(key))

    def cancel_wait(self) -> bool:
        """Cancel the wait. A wake-up that Redis has already sent is lost then.

        Returns:
            Whether a wait was under way.
        """
        waited = self.is_waiting
        if waited:
            self.close()
        return waited

    def close(self) -> None:
        """Close the connection."""
        self.waiting_since = None
        self.connection.close()
