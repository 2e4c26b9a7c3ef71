"""Declaring, counting, purging and deleting queues; the Simple interface; priorities."""

from __future__ import annotations

import socket
import time
from queue import Empty
from typing import Any

import pytest
from kombu import Connection

from tests.brokers import Broker
from tests.conformance.kombu_queue import KombuQueue, drain_idle


def passive_declare(room: KombuQueue) -> int:
    """Return the count of a passive declare, or 404."""
    channel: Any = room.connection.channel()
    try:
        declared: Any = room.queue(channel).queue_declare(passive=True)
        return int(declared.message_count)
    except room.connection.channel_errors as exc:
        return int(getattr(exc, "reply_code", 0))
    finally:
        channel.close()


def test_passive_declare_of_a_queue_that_never_was(connection: Connection, queue_name: str) -> None:
    from kombu import Queue

    with pytest.raises(connection.channel_errors) as caught:
        Queue(queue_name)(connection.channel()).queue_declare(passive=True)
    assert "NOT_FOUND" in str(caught.value)


def test_passive_declare_does_not_count_held_messages(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish(*range(7))
    kombu_queue.consume(prefetch_count=2)
    kombu_queue.drain(2)
    assert passive_declare(kombu_queue) == 5


def test_passive_declare_of_an_emptied_queue(kombu_queue: KombuQueue, broker: Broker) -> None:
    kombu_queue.publish(1)
    kombu_queue.consume(ack=True)
    kombu_queue.drain(1)
    drain_idle(kombu_queue.connection)
    assert passive_declare(kombu_queue) == broker.expected("passive declare of an emptied queue", 0)


def test_declare_returns_the_count(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish(*range(3))
    declared = kombu_queue.bound.queue_declare()
    assert kombu_queue.queue.name in str(declared)
    assert kombu_queue.channel.queue_declare(kombu_queue.queue.name).message_count == 3


def test_purge_returns_how_many_went(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish(*range(9))
    assert kombu_queue.bound.purge() == 9
    assert kombu_queue.bound.purge() == 0
    assert kombu_queue.count() == 0


def test_purge_spares_delivered_messages(kombu_queue: KombuQueue, other_connection: Connection) -> None:
    kombu_queue.publish(*range(4))
    kombu_queue.consume(prefetch_count=1)
    kombu_queue.drain(1)
    assert kombu_queue.bound.purge() == 3
    kombu_queue.connection.close()
    successor = KombuQueue(other_connection, kombu_queue.queue)
    successor.consume(ack=True)
    assert successor.drain(1) == [0]


def test_purge_of_more_than_one_chunk(kombu_queue: KombuQueue, broker: Broker) -> None:
    # A publish to ZooKeeper waits for a disk, and a chunk is half as large there.
    amount = 600 if broker.server == "zookeeper" else 2500
    kombu_queue.publish(*range(amount))
    assert kombu_queue.bound.purge() == amount
    assert kombu_queue.count() == 0


def test_delete_removes_the_messages(kombu_queue: KombuQueue, broker: Broker) -> None:
    kombu_queue.publish(*range(3))
    kombu_queue.bound.delete()
    assert passive_declare(kombu_queue) == broker.expected("passive declare of a deleted queue", 404)


def test_delete_if_empty_spares_a_full_queue(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish(1)
    kombu_queue.bound.delete(if_empty=True)
    assert passive_declare(kombu_queue) == 1


def test_a_deleted_queue_can_be_used_again(kombu_queue: KombuQueue, broker: Broker) -> None:
    kombu_queue.publish("old")
    kombu_queue.bound.delete()
    kombu_queue.bound.declare()
    kombu_queue.publish("new")
    kombu_queue.consume(ack=True)
    expected = broker.expected("bodies after deleting and declaring", ["new"])
    kombu_queue.drain(len(expected))
    drain_idle(kombu_queue.connection)
    assert kombu_queue.bodies == expected


def test_drain_events_keeps_its_timeout(kombu_queue: KombuQueue) -> None:
    kombu_queue.consume()
    started = time.monotonic()
    with pytest.raises(socket.timeout):
        kombu_queue.connection.drain_events(timeout=0.5)
    # The lower bound is the promise; the upper one only detects a hang.
    assert 0.45 <= time.monotonic() - started < 30


def test_drain_events_wakes_for_a_message(kombu_queue: KombuQueue, other_connection: Connection) -> None:
    import threading

    kombu_queue.consume(ack=True)
    sender = KombuQueue(other_connection, kombu_queue.queue)
    with pytest.raises(socket.timeout):
        kombu_queue.connection.drain_events(timeout=0.2)
    thread = threading.Timer(0.3, sender.publish, args=("late",))
    thread.start()
    kombu_queue.connection.drain_events(timeout=30)
    thread.join()
    assert kombu_queue.drain(1) == ["late"]


def test_simple_queue(connection: Connection, queue_name: str) -> None:
    with connection.SimpleQueue(queue_name) as queue:
        queue.put({"näme": "Größe"})
        queue.put([1, 2])
        assert queue.qsize() == 2
        message = queue.get(timeout=30)
        assert message.payload == {"näme": "Größe"}
        message.ack()
        queue.get(timeout=30).ack()
        with pytest.raises(queue.Empty):
            queue.get_nowait()
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.2)
        assert queue.clear() == 0
        assert queue.Empty is Empty


def test_simple_queue_returns_unacknowledged_messages(
    connection: Connection, other_connection: Connection, queue_name: str
) -> None:
    with connection.SimpleQueue(queue_name) as queue:
        queue.put("kept")
        queue.get(timeout=30)
    connection.close()
    with other_connection.SimpleQueue(queue_name) as queue:
        message = queue.get(timeout=30)
        assert message.payload == "kept"
        message.ack()


def test_simple_buffer(connection: Connection, queue_name: str) -> None:
    with connection.SimpleBuffer(queue_name) as buffer:
        for number in range(5):
            buffer.put(number)
        assert [buffer.get(timeout=30).payload for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(buffer.Empty):
            buffer.get(timeout=0.2)


def test_priority_per_queue(kombu_queue: KombuQueue, broker: Broker) -> None:
    low, high = broker.least_urgent, broker.most_urgent
    kombu_queue.publish("low 1", "low 2", priority=low)
    kombu_queue.publish("high 1", "high 2", priority=high)
    kombu_queue.consume(ack=True)
    assert kombu_queue.drain(4) == ["high 1", "high 2", "low 1", "low 2"]


def test_priority_overtakes_unfetched_messages(kombu_queue: KombuQueue, broker: Broker) -> None:
    kombu_queue.publish(*range(5), priority=broker.least_urgent)
    kombu_queue.consume(prefetch_count=1)
    kombu_queue.drain(1)
    kombu_queue.publish("urgent", priority=broker.most_urgent)
    kombu_queue.received[0].ack()
    assert kombu_queue.drain(2)[1] == "urgent"


@pytest.mark.parametrize("priority", [-5, 42])
def test_a_priority_beyond_the_scale(kombu_queue: KombuQueue, priority: int, broker: Broker) -> None:
    if broker.expected("a priority beyond the scale", "clamped") == "refused":
        with pytest.raises(ValueError, match=str(priority)):
            kombu_queue.publish("x", priority=priority)
        return
    kombu_queue.publish("x", priority=priority)
    kombu_queue.consume(ack=True)
    assert kombu_queue.drain(1) == ["x"]
