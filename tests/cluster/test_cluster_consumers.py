"""Consumers and publishers on a cluster while slots move, and masters fail or hang."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Message, Producer, Queue

from celery_dq.context import AppContext
from celery_dq.inspector.queues import queue_snapshots
from celery_dq.keys import PartitionKeys
from celery_dq.options.resolve import resolve
from celery_dq.testing.redis_cluster import ClusterNode, RedisCluster
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consuming.consumer_thread import EXIT_TIMEOUT_S
from celery_dq.transport.redis.store.cluster_client import ClusterClient
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from celery_dq.wiring import register_transports

#: Seconds of a lease in the tests with a master that hangs, so that many renewals get no answer.
LEASE_S = 2.0
#: Seconds of a lease in the test of an end, so that the calls to masters that hang count, and not the rest.
HUNG_LEASE_S = 6.0

_serial = count()
Publish = Callable[[int], None]


class Listener:
    """A consumer in a thread of its own, which notes what it receives and acknowledges it.

    Args:
        cluster: The cluster.
        queues: The queues to consume.
        prefetch_count: Its prefetch count.
        on_message: Called before each acknowledgement.
        options: Settings of its process, by their names.
    """

    def __init__(
        self,
        cluster: RedisCluster,
        *queues: str,
        prefetch_count: int = 10,
        on_message: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        self.received: list[int] = []
        self._cluster = cluster
        self._queues = queues
        self._prefetch_count = prefetch_count
        self._on_message = on_message
        context = AppContext("dq", lambda: resolve(options))
        self._connection = Connection(cluster.url(), transport_options={"dq": context})
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(60)
        self._connection.release()

    def _run(self) -> None:
        queues = [Queue(name) for name in self._queues]
        count = self._prefetch_count
        with Consumer(self._connection, queues, callbacks=[self._note], prefetch_count=count):
            while not self._stopped.is_set():
                try:
                    self._connection.drain_events(timeout=0.5)
                except TimeoutError:
                    continue

    def _note(self, body: int, message: Message) -> None:
        self._on_message()
        self.received.append(body)
        message.ack()


def wait_for(count: int, *listeners: Listener, timeout_s: float = 30) -> None:
    """Wait until the listeners have received so many messages."""
    wait_until(lambda: sum(len(each.received) for each in listeners) == count, timeout_s)


def keys_of(queue: str) -> PartitionKeys:
    return PartitionKeys("online", queue, on_cluster=True)


def wait_for_subscribers(cluster: RedisCluster, queue: str, number: int) -> None:
    """Wait until so many consumers would hear of a wake-up of a queue."""
    keys = keys_of(queue)

    def subscribers() -> int:
        answer: Any = cluster.master_of(keys.slot).ask("PUBSUB", "SHARDNUMSUB", keys.woken)
        return int(answer[1])

    wait_until(lambda: subscribers() == number)


def publisher(connection: Connection, queue: str) -> Publish:
    producer = Producer(connection, routing_key=queue)
    return lambda number: producer.publish(number, declare=[Queue(queue)], retry=True)


@pytest.fixture
def publish(connection: Connection, queue_name: str) -> Publish:
    """A function that publishes a number to the queue, which has the 0."""
    found = publisher(connection, queue_name)
    found(0)
    return found


def test_an_idle_consumer_is_woken(redis_cluster: RedisCluster, queue_name: str, publish: Publish) -> None:
    with Listener(redis_cluster, queue_name) as listener:
        wait_until(lambda: listener.received == [0])
        wait_for_subscribers(redis_cluster, queue_name, 1)
        for number in range(1, 6):
            publish(number)
            # Much sooner than the next heartbeat, which would repeat a lost message.
            wait_for(number + 1, listener, timeout_s=3.0)
    assert listener.received == list(range(6))


def test_one_of_many_consumers_takes_a_wake_up(
    redis_cluster: RedisCluster, queue_name: str, publish: Publish
) -> None:
    with Listener(redis_cluster, queue_name) as one, Listener(redis_cluster, queue_name) as other:
        wait_for(1, one, other)
        # Both use the same process, but each channel subscribes by itself.
        wait_for_subscribers(redis_cluster, queue_name, 2)
        for number in range(1, 20):
            publish(number)
            wait_for(number + 1, one, other, timeout_s=3.0)
    assert sorted(one.received + other.received) == list(range(20))


def test_a_slot_that_moves_takes_its_consumers_along(
    redis_cluster: RedisCluster, queue_name: str, publish: Publish
) -> None:
    with Listener(redis_cluster, queue_name) as listener:
        wait_until(lambda: listener.received == [0])
        for number in (1, 2, 3):
            wait_for_subscribers(redis_cluster, queue_name, 1)
            redis_cluster.move_slot(keys_of(queue_name).slot)
            publish(number)
            wait_for(number + 1, listener, timeout_s=5.0)
    assert listener.received == [0, 1, 2, 3]


def test_a_consumer_that_ends_as_its_slot_moves_stops_no_other(
    redis_cluster: RedisCluster, connection: Connection
) -> None:
    channel: Any = connection.default_channel
    (stays, moves), got = queues_on_one_master(redis_cluster), list[Message]()
    consumers = [
        Consumer(channel, [Queue(name)], on_message=got.append, prefetch_count=9) for name in (stays, moves)
    ]
    for each in consumers:
        each.consume()
    for name in (stays, moves):
        wait_for_subscribers(redis_cluster, name, 1)
    thread = channel.identity.threads.of(channel.queues(moves).partitions[0])
    stands, may_go_on = threading.Event(), threading.Event()
    thread.request(stands.set)
    thread.request(partial(may_go_on.wait, 30))
    assert stands.wait(30)
    redis_cluster.move_slot(keys_of(moves).slot)
    # The thread asks the former master for the end of the subscription, and gets MOVED.
    ending = threading.Thread(target=consumers[1].cancel)
    ending.start()
    wait_until(lambda: thread._requests)
    may_go_on.set()
    ending.join(30)
    for number in range(3):
        Producer(connection, routing_key=stays).publish(number)
        wait_until(partial(received, connection, got, number + 1), 3)
        got[-1].ack()
    assert [message.payload for message in got] == [0, 1, 2]


def received(connection: Connection, got: list[Message], count: int) -> bool:
    """Drain for a moment; return whether so many messages were received."""
    with contextlib.suppress(TimeoutError):
        connection.drain_events(timeout=0.05)
    return len(got) == count


def queues_on_one_master(cluster: RedisCluster) -> tuple[str, str]:
    """Return the names of two new queues on one master."""
    first = f"together-{next(_serial)}"
    others = (f"together-{next(_serial)}" for _ in count())
    master = cluster.master_of(keys_of(first).slot)
    return first, next(name for name in others if cluster.master_of(keys_of(name).slot) is master)


def test_a_fail_over_is_waited_out(redis_cluster: RedisCluster, queue_name: str, publish: Publish) -> None:
    with Listener(redis_cluster, queue_name) as listener:
        wait_until(lambda: listener.received == [0])
        wait_for_subscribers(redis_cluster, queue_name, 1)
        master = redis_cluster.master_of(keys_of(queue_name).slot)
        wait_until(lambda: master.ask("WAIT", 1, 1000) == 1)
        master.kill()
        try:
            publish(1)  # it waits for the promotion of the replica
            wait_until(lambda: listener.received == [0, 1])
        finally:
            redis_cluster.restore()
        publish(2)
        wait_until(lambda: listener.received == [0, 1, 2])


# -- several masters ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def patient_cluster() -> Iterator[RedisCluster]:
    """A cluster in which no replica takes over while a master hangs."""
    register_transports()
    with RedisCluster(node_timeout_ms=120_000) as cluster:
        yield cluster


def queue_on_each_master(cluster: RedisCluster) -> dict[ClusterNode, str]:
    """Return the name of a new queue on each master."""
    found: dict[ClusterNode, str] = {}
    while len(found) < len(cluster.masters()):
        name = f"spread-{next(_serial)}"
        found.setdefault(cluster.master_of(keys_of(name).slot), name)
    return found


def test_a_master_that_hangs_stops_its_own_queues_only(patient_cluster: RedisCluster) -> None:
    queues = queue_on_each_master(patient_cluster)
    hanging, *others = queues
    with (
        Connection(patient_cluster.url()) as connection,
        Listener(patient_cluster, *queues.values(), dq_lease=LEASE_S) as listener,
    ):
        publish = {node: publisher(connection, name) for node, name in queues.items()}
        for number, node in enumerate(queues):
            publish[node](number)
        wait_for(3, listener)
        hanging.pause()
        try:
            # One message after the other, over many renewals that the master does not answer.
            for number in range(3, 63):
                publish[others[number % 2]](number)
                wait_for(number + 1, listener, timeout_s=10)
        finally:
            hanging.resume()
        publish[hanging](63)
        wait_for(64, listener)
    assert sorted(listener.received) == list(range(64))


def test_an_ack_is_confirmed_beside_a_master_that_hangs(patient_cluster: RedisCluster) -> None:
    hanging, healthy, *_ = queues = queue_on_each_master(patient_cluster)
    context = AppContext("dq", lambda: resolve({"dq_lease": LEASE_S}))
    with Connection(patient_cluster.url(), transport_options={"dq": context}) as connection:
        channel: Any = connection.default_channel
        for node in (hanging, healthy, healthy):
            publisher(connection, queues[node])(0)
        hung, acked, last = (channel.basic_get(queues[node]) for node in (hanging, healthy, healthy))
        hanging.pause()
        try:
            with pytest.raises(redis.ConnectionError):
                hung.ack()
            acked.ack()
            last.requeue()
            assert channel.basic_get(queues[healthy], no_ack=True) is not None
        finally:
            hanging.resume()


def test_a_requeue_is_confirmed_while_another_thread_takes_the_lease(
    redis_cluster: RedisCluster, connection: Connection, queue_name: str, publish: Publish
) -> None:
    channel: Any = connection.default_channel
    message = channel.basic_get(queue_name)
    identity = channel.identity
    (thread,) = (each for each in identity.threads.all if each.queues)
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        may_go_on.wait(30)

    thread.request(hold)
    assert is_held.wait(30)
    changes = identity.slots.changes
    redis_cluster.move_slot(keys_of(queue_name).slot)
    publish(1)
    wait_until(lambda: identity.slots.changes > changes)
    requeueing = threading.Thread(target=message.requeue)
    requeueing.start()
    wait_until(lambda: thread._requests)
    may_go_on.set()
    requeueing.join(30)
    assert channel.basic_get(queue_name, no_ack=True).payload == 0


def test_the_masters_share_a_prefetch_count(
    redis_cluster: RedisCluster, connection: Connection, client: ClusterClient
) -> None:
    queues = queue_on_each_master(redis_cluster)
    scripts = load_scripts(on_cluster=True)
    partitions = [[Partition(keys_of(name), scripts)] for name in queues.values()]
    calls = count()

    def count_held() -> None:
        if next(calls) % 6 == 0:
            # The acknowledgement of the message before may be on its way.
            wait_until(lambda: held() == 1)
            assert [held() for _ in range(20)] == [1] * 20

    def held() -> int:
        return sum(each.held for each in queue_snapshots(partitions, client, ages=False))

    for node_number, name in enumerate(queues.values()):
        publish = publisher(connection, name)
        for number in range(20):
            publish(node_number * 20 + number)
    with Listener(redis_cluster, *queues.values(), prefetch_count=1, on_message=count_held) as listener:
        wait_for(60, listener)
    assert sorted(listener.received) == list(range(60))
    # No master waits until the others are empty.
    thirds = [{number // 20 for number in listener.received[start : start + 40]} for start in (0, 20)]
    assert thirds == [{0, 1, 2}, {0, 1, 2}]


def test_masters_that_hang_delay_the_end_of_a_consumer_together(patient_cluster: RedisCluster) -> None:
    queues = queue_on_each_master(patient_cluster)
    listener = Listener(patient_cluster, *queues.values(), dq_lease=HUNG_LEASE_S)
    with Connection(patient_cluster.url()) as connection, listener:
        for number, name in enumerate(queues.values()):
            publisher(connection, name)(number)
            wait_for_subscribers(patient_cluster, name, 1)
        wait_for(3, listener)
        try:
            for node in queues:
                node.pause()
            began = time.monotonic()
            listener.stop()
            took_s = time.monotonic() - began
        finally:
            for node in queues:
                node.resume()
    # Each thread makes two calls to its master, which give up after a quarter of the lease.
    assert took_s < 3.5 * HUNG_LEASE_S / 4


#: Consumes the queues that are its arguments, and ends without closing its connection when stdin does.
ENDING = """
import sys
from kombu import Connection, Consumer, Queue
from celery_dq.wiring import register_transports
register_transports()
connection = Connection(sys.argv[1])
got = []
def note(message):
    got.append(message)
    message.ack()
Consumer(connection, [Queue(each) for each in sys.argv[2:]], on_message=note).consume()
while len(got) < 3:
    connection.drain_events(timeout=30)
print("consumes", flush=True)
sys.stdin.read()
"""


def test_masters_that_hang_delay_the_exit_of_a_process_together(patient_cluster: RedisCluster) -> None:
    queues = queue_on_each_master(patient_cluster)
    with Connection(patient_cluster.url()) as connection:
        for number, name in enumerate(queues.values()):
            publisher(connection, name)(number)
    process = subprocess.Popen(
        [sys.executable, "-c", ENDING, patient_cluster.url(), *queues.values()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "consumes\n"
    try:
        for node in queues:
            node.pause()
        began = time.monotonic()
        _, logged = process.communicate(timeout=60)
        took_s = time.monotonic() - began
    finally:
        for node in queues:
            node.resume()
    assert process.returncode == 0
    assert logged.count("tasks that ended last may run again") == len(queues)
    assert took_s < 2 * EXIT_TIMEOUT_S
