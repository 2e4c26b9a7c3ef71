"""A fetcher on a real server that a test drives step by step, with a capacity set by the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.consuming.consuming_channel import WatchedSocket
from celery_dq.transport.redis.consuming.fetcher import RedisFetcher
from celery_dq.transport.redis.consuming.subscriptions import Subscription
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.pipelined_connection import PipelinedConnection, has_arrived
from celery_dq.transport.redis.store.queue import Queue

#: Long, because no heartbeat thread renews the lease here.
LEASE_S = 600.0


class CountingWire(PipelinedConnection):
    """Counts the scripts that were sent over it."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(pool)
        self.sent = 0

    def send(self, command: tuple[Any, ...]) -> None:
        self.sent += 1
        super().send(command)


class FetcherHarness:
    """One consumer.

    Args:
        url: URL of the server for redis-py.
        room: Maximum number of messages, received ones included.
        queues: Names of the consumed queues.
        process: Consumer identity of an earlier connection; None for a new one.
        holds: Whether it can keep a next look while it works.
    """

    def __init__(
        self,
        url: str,
        room: int,
        queues: tuple[str, ...],
        process: ConsumerIdentity | None = None,
        holds: bool = True,
    ) -> None:
        self.room = room
        self.holds = holds
        self.process = process or ConsumerIdentity(LEASE_S)
        self.got: list[str] = []
        self.tags: list[str] = []
        self.on_message: Callable[[], None] | None = None
        self._pool = redis.ConnectionPool.from_url(url)
        self.fetcher = RedisFetcher(
            self.process,
            self._pool,
            self,
        )
        self.scripts = self.fetcher.pipeline.connection = CountingWire(self._pool)
        for name in queues:
            partition = Partition(PartitionKeys("online", name), self.process.scripts)
            self.fetcher.subscribe(Queue(name, partition))

    @property
    def left(self) -> int:
        return max(self.room - len(self.got), 0)

    @property
    def is_quiet(self) -> bool:
        """Whether it waits for a wake-up, and for no other answer."""
        return self.fetcher.wakeups.is_waiting and not self.fetcher.expects_answer and not self._arrived()

    def capacity(self) -> tuple[int, int]:
        return self.left, self.left

    def can_keep_next_look(self) -> bool:
        return self.holds

    @property
    def acks_may_wait(self) -> bool:
        return self.holds

    def receive(self, source: Subscription, entry: ClaimedEntry, tag: str) -> None:
        self.got.append(entry.id)
        self.tags.append(tag)
        if self.on_message is not None:
            self.on_message()

    def _arrived(self) -> list[WatchedSocket]:
        return [each for each in self.fetcher.connections() if has_arrived(each.connection)]

    def turn(self) -> None:
        """Run one turn of an event loop."""
        self.fetcher.tick()
        for each in self._arrived():
            if has_arrived(each.connection):  # an earlier one of this turn may have read the answer
                each.read()

    def close(self) -> None:
        self.fetcher.close()
        self._pool.disconnect()


def turn_until(condition: Callable[[], Any], *harnesses: FetcherHarness, timeout_s: float = 30.0) -> None:
    """Drive these consumers until `condition()` is true."""

    def turned() -> Any:
        for each in harnesses:
            each.turn()
        return condition()

    wait_until(turned, timeout_s, interval_s=0.001, what=lambda: f"got: {[each.got for each in harnesses]}")


def turn_for(seconds: float, *harnesses: FetcherHarness) -> None:
    """Drive these consumers for some seconds, to see that nothing happens."""
    end = time.monotonic() + seconds
    turn_until(lambda: time.monotonic() >= end, *harnesses)
