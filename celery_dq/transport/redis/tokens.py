"""The wait for a *token* of any of the queues that a channel consumes: one ``BLPOP`` on a wire of its own."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.wire import BLPOP_SECONDS, OVERDUE_SECONDS, Wire


class Tokens:
    """What one channel waits for.

    Arguments:
        pool: where the connection comes from.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self.wire = Wire(pool)
        #: Monotonic time since when it waits; None while it does not.
        self.since: float | None = None
        self._queues: dict[bytes, str] = {}

    @property
    def waits(self) -> bool:
        """Whether a token that comes now comes to us."""
        return self.since is not None

    def wait(self, queues: Iterable[Queue], now: float) -> None:
        """Wait for a token of these from now on.

        Raises:
            redis.RedisError: the connection broke.
        """
        self._queues = {queue.partition.keys.wake.encode(): queue.name for queue in queues}
        self.wire.open()
        self.wire.send(("BLPOP", *self._queues, BLPOP_SECONDS))
        self.since = now

    def check(self, now: float) -> None:
        """See that the wait is answered in time.

        Raises:
            redis.ConnectionError: it is not.
        """
        silent_s = 0.0 if self.since is None else now - self.since
        # An answer that lies there unread says that it was us who was busy.
        if silent_s > BLPOP_SECONDS + OVERDUE_SECONDS and not self.wire.arrived():
            raise redis.ConnectionError(
                f"Redis has not answered a BLPOP for {silent_s:.0f} s: the connection is dead"
            )

    def take(self) -> str | None:
        """Read the answer; return the name of the queue whose token has come, if one has.

        Raises:
            redis.RedisError: the connection broke, or the answer is an error.
        """
        answer = self.wire.read()
        self.since = None
        if answer is None:
            return None
        key = answer[0]
        return self._queues.get(key.encode() if isinstance(key, str) else bytes(key))

    def give_up(self) -> bool:
        """Wait no more; return whether we did. A token may have been on its way, and is lost then."""
        waited = self.waits
        if waited:
            self.close()
        return waited

    def close(self) -> None:
        """Close the wire."""
        self.since = None
        self.wire.close()
