"""Consumers and publishers on a cluster while slots move and masters fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kombu import Connection, Consumer, Message, Producer, Queue

from celery_dq.context import AppContext
from celery_dq.options.resolve import resolve
from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.waiting import wait_until

#: Seconds in which a wake-up arrives, also on a slow machine.
SOON_S = 8


class Listener:
    """A consumer in a thread of its own, which notes what it receives and acknowledges it."""

    def __init__(self, cluster: RedisCluster, queue: str) -> None:
        self.received: list[int] = []
        # No heartbeat finds a message whose wake-up was lost before the deadline of the test.
        context = AppContext("dq", lambda: resolve({"dq_lease": 240}))
        self._connection = Connection(cluster.url(), transport_options={"dq": context})
        self._queue = Queue(queue)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join(30)
        self._connection.release()

    @property
    def fetcher(self) -> Any:
        """The fetcher of its channel."""
        channel: Any = self._connection.default_channel
        return channel.consumer.fetcher

    def waits(self) -> bool:
        """Return whether it has nothing to do but wait for wake-ups."""
        return bool(self.fetcher.wakeups.is_waiting) and not self.fetcher.expects_answer

    def _run(self) -> None:
        with Consumer(self._connection, [self._queue], callbacks=[self._note], prefetch_count=10):
            while not self._stopped.is_set():
                try:
                    self._connection.drain_events(timeout=0.5)
                except TimeoutError:
                    continue

    def _note(self, body: int, message: Message) -> None:
        self.received.append(body)
        message.ack()


def wait_for(count: int, *listeners: Listener) -> None:
    """Wait until the listeners have received so many messages."""
    wait_until(lambda: sum(len(each.received) for each in listeners) == count, SOON_S)


def publisher(connection: Connection, queue: str) -> Callable[[int], None]:
    producer = Producer(connection, routing_key=queue)
    return lambda number: producer.publish(number, declare=[Queue(queue)], retry=True)


def slot_of_queue(connection: Connection, queue: str) -> int:
    channel: Any = connection.default_channel
    return int(channel.partition(queue).keys.slot)


def test_an_idle_consumer_is_woken(
    redis_cluster: RedisCluster, connection: Connection, queue_name: str
) -> None:
    publish = publisher(connection, queue_name)
    publish(0)
    with Listener(redis_cluster, queue_name) as listener:
        wait_until(lambda: listener.received == [0])
        for number in range(1, 6):
            wait_until(listener.waits)
            publish(number)
            wait_for(number + 1, listener)
    assert listener.received == list(range(6))


def test_one_of_many_consumers_takes_a_wake_up(
    redis_cluster: RedisCluster, connection: Connection, queue_name: str
) -> None:
    publish = publisher(connection, queue_name)
    publish(0)
    with Listener(redis_cluster, queue_name) as one, Listener(redis_cluster, queue_name) as other:
        wait_until(lambda: len(one.received) + len(other.received) == 1)
        for number in range(1, 20):
            wait_until(lambda: one.waits() and other.waits())
            publish(number)
            wait_for(number + 1, one, other)
    assert sorted(one.received + other.received) == list(range(20))


def test_a_slot_that_moves_takes_its_consumers_along(
    redis_cluster: RedisCluster, connection: Connection, queue_name: str
) -> None:
    publish = publisher(connection, queue_name)
    publish(0)
    with Listener(redis_cluster, queue_name) as listener:
        wait_until(lambda: listener.received == [0] and listener.waits())
        for number in (1, 2, 3):
            redis_cluster.move_slot(slot_of_queue(connection, queue_name))
            publish(number)
            wait_for(number + 1, listener)
    assert listener.received == [0, 1, 2, 3]


def test_a_fail_over_is_waited_out(
    redis_cluster: RedisCluster, connection: Connection, queue_name: str
) -> None:
    publish = publisher(connection, queue_name)
    publish(0)
    with Listener(redis_cluster, queue_name) as listener:
        wait_until(lambda: listener.received == [0] and listener.waits())
        master = redis_cluster.master_of(slot_of_queue(connection, queue_name))
        wait_until(lambda: master.ask("WAIT", 1, 1000) == 1)
        master.kill()
        try:
            publish(1)  # it waits for the promotion of the replica
            wait_until(lambda: listener.received == [0, 1])
        finally:
            redis_cluster.restore()
        publish(2)
        wait_until(lambda: listener.received == [0, 1, 2])
