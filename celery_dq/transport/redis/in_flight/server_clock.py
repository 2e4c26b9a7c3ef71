"""The time of Redis, extrapolated in this process."""

from __future__ import annotations

import redis

from celery_dq.clock import Clock


class ServerClock:
    """The wall clock of one Redis server, extrapolated by the monotonic clock of this machine.

    It is behind the server's by the way of the answer, and never ahead of it.

    Args:
        clock: the clock of this machine.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Server time minus monotonic time, in seconds; None until the server was asked.
        self._offset: float | None = None

    def ask(self, client: redis.Redis) -> None:
        """Ask the server for its time.

        Raises:
            redis.RedisError: No answer.
        """
        seconds, microseconds = client.time()
        # The server has read its clock before this moment, so that no time of it is taken for over too early.
        self._offset = seconds + microseconds / 1e6 - self._clock.monotonic()

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC by the server's clock; by this machine's before an answer."""
        return self._clock.wall() if self._offset is None else self._clock.monotonic() + self._offset
