"""The claims of a consumer thread on a real server, turn by turn, with a capacity set by the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.in_flight import InFlightMessage
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming import consumer_thread
from celery_dq.transport.redis.consuming.channel_claims import ChannelClaims, DiscardPace
from celery_dq.transport.redis.consuming.consumer_threads import ConsumerThreads
from celery_dq.transport.redis.consuming.subscriptions import Subscription
from celery_dq.transport.redis.store.partition import Partition, Queue
from celery_dq.transport.redis.store.script_calls import PipelinedConnection, has_arrived

#: Long, because nothing renews the lease here.
LEASE_S = 600.0


class CountingWire(PipelinedConnection):
    """Counts the trips over it, and the scripts that they sent."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(pool)
        self.sent = 0

    def send(self, command: tuple[Any, ...]) -> None:
        self.sent += 1
        super().send(command)

    def send_all(self, commands: Sequence[tuple[Any, ...]], check_health: bool = False) -> None:
        self.sent += len(commands)
        super().send_all(commands, check_health)


class ClaimsHarness:
    """One consumer.

    Args:
        url: URL of the server for redis-py.
        room: Maximum number of messages, received ones included.
        queues: Names of the consumed queues.
        process: Consumer identity of an earlier connection; None for a new one.
    """

    suspect: str | None = None

    def __init__(
        self, url: str, room: int, queues: tuple[str, ...], process: ConsumerIdentity | None = None
    ) -> None:
        self.room = room
        self.process = process or ConsumerIdentity(LEASE_S)
        self.process.threads = ConsumerThreads(self.process)
        self.got: list[str] = []
        self.tags: list[str] = []
        self.on_message: Callable[[], None] | None = None
        self.lock = threading.Lock()
        self.discard_pace = DiscardPace(self.process.clock)
        self._pool = redis.ConnectionPool.from_url(url)
        self.thread = self.process.threads.main
        # The test makes its turns, so that no lease starts it.
        self.thread.is_running = True
        self.thread._connect = lambda: redis.Redis(connection_pool=self._pool)
        self.thread._waker.fileno()
        self.scripts = self.thread._wire = CountingWire(self._pool)
        self.claims = ChannelClaims(self.process, self.thread, self)
        self.thread.serve(self.claims)
        for name in queues:
            partition = Partition(PartitionKeys("online", name), self.process.scripts)
            self.claims.subscribe(Queue(name, partition))

    @property
    def left(self) -> int:
        return max(self.room - len(self.got), 0)

    @property
    def is_quiet(self) -> bool:
        """Whether it waits for a wake-up that has not come."""
        groups = self.claims.wakeups
        return groups.is_waiting and not any(has_arrived(each.connection.connection) for each in groups)

    # -- the inboxes of the claims

    def capacity(self, claims: ChannelClaims) -> tuple[int, int]:
        return self.left, self.left

    awaits_ends = False

    def hands_over_at(self) -> float:
        return float("-inf")

    def receive(self, subscription: Subscription, entry: ClaimedEntry, held: InFlightMessage) -> None:
        self.got.append(entry.id)
        self.tags.append(held.tag)
        if self.on_message is not None:
            self.on_message()

    def before_trip(self, claims: ChannelClaims, now: float) -> float:
        return float("inf")

    def after_trip(self, claims: ChannelClaims) -> None:
        """Do nothing: there is no delivery."""

    has_room = after_trip

    def place(self, claims: ChannelClaims, subscription: Subscription) -> None:
        """Do nothing: there is one thread."""

    def check_consumption(self, claims: ChannelClaims, now: float) -> None:
        """Do nothing: the test looks itself."""

    def fail(self, error: Exception) -> None:
        raise error

    # -- turns

    def turn(self) -> None:
        """Make one turn of the thread."""
        self.thread._turn()

    def close(self) -> None:
        """Lose the connection, as the thread does."""
        self.claims.close()
        self.thread._disconnect()
        self.thread._waker.close()
        self._pool.disconnect()


def turn_until(condition: Callable[[], Any], *harnesses: ClaimsHarness, timeout_s: float = 30.0) -> None:
    """Make turns of these consumers until `condition()` is true."""
    longest_s, consumer_thread.MAX_WAIT_S = consumer_thread.MAX_WAIT_S, 0.0

    def turned() -> Any:
        for each in harnesses:
            each.turn()
        return condition()

    try:
        wait_until(
            turned, timeout_s, interval_s=0.001, what=lambda: f"got: {[each.got for each in harnesses]}"
        )
    finally:
        consumer_thread.MAX_WAIT_S = longest_s


def turn_for(seconds: float, *harnesses: ClaimsHarness) -> None:
    """Make turns of these consumers for some seconds, to see that nothing happens."""
    end = time.monotonic() + seconds
    turn_until(lambda: time.monotonic() >= end, *harnesses)
