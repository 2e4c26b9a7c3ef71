"""Declaring, counting, purging and deleting queues; the Simple interface; priorities."""

from __future__ import annotations

import socket
import time
from queue import Empty
from typing import Any

import pytest
from kombu import Connection

from tests.brokers import Broker
from tests.conformance.mailroom import Mailroom, drain_idle


def passive_declare(room: Mailroom) -> int:
    """The count that a passive declare returns, or 404."""
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


def test_passive_declare_counts_what_waits(mailroom: Mailroom) -> None:
    mailroom.publish(*range(7))
    assert passive_declare(mailroom) == 7


def test_passive_declare_does_not_count_what_is_held(mailroom: Mailroom) -> None:
    mailroom.publish(*range(7))
    mailroom.consume(prefetch_count=2)
    mailroom.drain(2)
    assert passive_declare(mailroom) == 5


def test_passive_declare_of_an_emptied_queue(mailroom: Mailroom, broker: Broker) -> None:
    mailroom.publish(1)
    mailroom.consume(ack=True)
    mailroom.drain(1)
    drain_idle(mailroom.connection)
    assert passive_declare(mailroom) == broker.expected("passive declare of an emptied queue", 0)


def test_declare_returns_the_count(mailroom: Mailroom) -> None:
    mailroom.publish(*range(3))
    declared = mailroom.bound.queue_declare()
    assert mailroom.queue.name in str(declared)
    assert mailroom.channel.queue_declare(mailroom.queue.name).message_count == 3


def test_purge_returns_how_many_went(mailroom: Mailroom) -> None:
    mailroom.publish(*range(9))
    assert mailroom.bound.purge() == 9
    assert mailroom.bound.purge() == 0
    assert mailroom.count() == 0


def test_purge_spares_what_is_in_hand(mailroom: Mailroom, other_connection: Connection) -> None:
    mailroom.publish(*range(4))
    mailroom.consume(prefetch_count=1)
    mailroom.drain(1)
    assert mailroom.bound.purge() == 3
    mailroom.connection.close()
    successor = Mailroom(other_connection, mailroom.queue)
    successor.consume(ack=True)
    assert successor.drain(1) == [0]


def test_purge_of_more_than_one_chunk(mailroom: Mailroom, broker: Broker) -> None:
    # A publish to ZooKeeper waits for a disk, and a chunk is half as large there.
    amount = 600 if broker.server == "zookeeper" else 2500
    mailroom.publish(*range(amount))
    assert mailroom.bound.purge() == amount
    assert mailroom.count() == 0


def test_delete_removes_the_messages(mailroom: Mailroom, broker: Broker) -> None:
    mailroom.publish(*range(3))
    mailroom.bound.delete()
    assert passive_declare(mailroom) == broker.expected("passive declare of a deleted queue", 404)


def test_delete_if_empty_spares_a_full_queue(mailroom: Mailroom) -> None:
    mailroom.publish(1)
    mailroom.bound.delete(if_empty=True)
    assert passive_declare(mailroom) == 1


def test_a_deleted_queue_can_be_used_again(mailroom: Mailroom, broker: Broker) -> None:
    mailroom.publish("old")
    mailroom.bound.delete()
    mailroom.bound.declare()
    mailroom.publish("new")
    mailroom.consume(ack=True)
    expected = broker.expected("bodies after deleting and declaring", ["new"])
    mailroom.drain(len(expected))
    drain_idle(mailroom.connection)
    assert mailroom.bodies == expected


def test_drain_events_keeps_its_timeout(mailroom: Mailroom) -> None:
    mailroom.consume()
    started = time.monotonic()
    with pytest.raises(socket.timeout):
        mailroom.connection.drain_events(timeout=0.5)
    # A lower bound is the promise; the upper one only tells a hang from a wait.
    assert 0.45 <= time.monotonic() - started < 5


def test_drain_events_wakes_for_a_message(mailroom: Mailroom, other_connection: Connection) -> None:
    import threading

    mailroom.consume(ack=True)
    sender = Mailroom(other_connection, mailroom.queue)
    with pytest.raises(socket.timeout):
        mailroom.connection.drain_events(timeout=0.2)
    thread = threading.Timer(0.3, sender.publish, args=("late",))
    thread.start()
    mailroom.connection.drain_events(timeout=30)
    thread.join()
    assert mailroom.drain(1) == ["late"]


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


def test_simple_queue_returns_what_was_not_acknowledged(
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


def test_priority_per_queue(mailroom: Mailroom, broker: Broker) -> None:
    low, high = broker.least_urgent, broker.most_urgent
    mailroom.publish("low 1", "low 2", priority=low)
    mailroom.publish("high 1", "high 2", priority=high)
    mailroom.consume(ack=True)
    assert mailroom.drain(4) == ["high 1", "high 2", "low 1", "low 2"]


def test_priority_overtakes_what_is_not_yet_fetched(mailroom: Mailroom, broker: Broker) -> None:
    mailroom.publish(*range(5), priority=broker.least_urgent)
    mailroom.consume(prefetch_count=1)
    mailroom.drain(1)
    mailroom.publish("urgent", priority=broker.most_urgent)
    mailroom.received[0].ack()
    assert mailroom.drain(2)[1] == "urgent"


@pytest.mark.parametrize("priority", [-5, 42])
def test_a_priority_beyond_the_scale(mailroom: Mailroom, priority: int, broker: Broker) -> None:
    if broker.expected("a priority beyond the scale", "clamped") == "refused":
        with pytest.raises(ValueError, match=str(priority)):
            mailroom.publish("x", priority=priority)
        return
    mailroom.publish("x", priority=priority)
    mailroom.consume(ack=True)
    assert mailroom.drain(1) == ["x"]
