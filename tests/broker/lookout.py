"""A fetcher that a test turns by hand, with as much room as the test says, on a real server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis
from kombu.utils.eventio import ERR, READ, poll

from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.fetcher import Fetcher
from celery_dq.transport.redis.partition import Partition
from celery_dq.transport.redis.process import Process
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.replies import ClaimedEntry
from celery_dq.transport.redis.source import Source
from celery_dq.transport.redis.wire import Wire

#: Of the leases: there is no heartbeat here, so nobody is helped by one.
LEASE_S = 600.0


class CountingWire(Wire):
    """Knows how many scripts went over it."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(pool)
        self.sent = 0

    def send(self, command: tuple[Any, ...]) -> None:
        self.sent += 1
        super().send(command)


class Lookout:
    """One consumer.

    Arguments:
        url: of the server.
        room: how many messages it takes; what it has got counts.
        queues: names of what it consumes.
        process: of an earlier connection; default: a new one.
        holds: whether it keeps appointments though it works.
    """

    def __init__(
        self,
        url: str,
        room: int,
        queues: tuple[str, ...],
        process: Process | None = None,
        holds: bool = True,
    ) -> None:
        self.room = room
        self.holds = holds
        self.process = process or Process(LEASE_S)
        self.got: list[str] = []
        self.tags: list[str] = []
        self.on_message: Callable[[], None] | None = None
        self._pool = redis.ConnectionPool.from_url(url)
        self.fetcher = Fetcher(
            self.process,
            self._pool,
            room=lambda: (self.left, self.left),
            keeps_appointments=lambda: self.holds,
            deliver=self._deliver,
        )
        self.scripts = self.fetcher.teller.wire = CountingWire(self._pool)
        for name in queues:
            partition = Partition(PartitionKeys("online", name), self.process.scripts)
            self.fetcher.consume(Queue(name, partition))

    @property
    def left(self) -> int:
        return max(self.room - len(self.got), 0)

    @property
    def is_quiet(self) -> bool:
        """It waits for a token, and for nothing else."""
        return self.fetcher.tokens.waits and not self.fetcher.expects_answer and not self._arrived()

    def _deliver(self, source: Source, entry: ClaimedEntry, tag: str) -> None:
        self.got.append(entry.id)
        self.tags.append(tag)
        if self.on_message is not None:
            self.on_message()

    def _arrived(self) -> list[int]:
        waiting = poll()
        try:
            for _, connection in self.fetcher.connections():
                waiting.register(connection._sock.fileno(), READ | ERR)
            return [fd for fd, _ in waiting.poll(0) or ()]
        finally:
            waiting.close()

    def turn(self) -> None:
        """One round of an event loop."""
        self.fetcher.tick()
        for fd in self._arrived():
            self.fetcher.on_readable(fd)

    def close(self) -> None:
        self.fetcher.close()
        self._pool.disconnect()


def turn_until(condition: Callable[[], Any], *lookouts: Lookout, timeout_s: float = 30.0) -> None:
    """Turn these until `condition()`."""

    def turned() -> Any:
        for each in lookouts:
            each.turn()
        return condition()

    wait_until(turned, timeout_s, interval_s=0.001, what=lambda: f"got: {[each.got for each in lookouts]}")


def turn_for(seconds: float, *lookouts: Lookout) -> None:
    """Turn these for a while, to see that nothing comes of it."""
    end = time.monotonic() + seconds
    turn_until(lambda: time.monotonic() >= end, *lookouts)
