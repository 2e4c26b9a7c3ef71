"""The time of Redis, extrapolated in this process."""

from __future__ import annotations

import redis

from celery_dq.clock import Clock


class ServerClock:
    """The wall clock of one Redis server, extrapolated by the monotonic clock of this machine.

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
        sent_at = self._clock.monotonic()
        seconds, microseconds = client.time()
        # The server read its clock between sending and answer, half-way on average.
        self._offset = seconds + microseconds / 1e6 - (sent_at + self._clock.monotonic()) / 2

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC by the server's clock; by this machine's before an answer."""
        return self._clock.wall() if self._offset is None else self._clock.monotonic() + self._offset
