"""Publishing, consuming, acknowledging: what a consumer holds, and what comes back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from kombu import Connection, Consumer, Message, Queue
from kombu.exceptions import MessageStateError

from tests.brokers import Broker
from tests.conformance.mailroom import Mailroom, drain_idle, drain_until


def test_messages_arrive_in_the_order_of_publishing(mailroom: Mailroom) -> None:
    mailroom.publish(*range(100))
    mailroom.consume(ack=True)
    assert mailroom.drain(100) == list(range(100))


def test_an_acknowledged_message_is_gone(mailroom: Mailroom, other_connection: Connection) -> None:
    mailroom.publish("once")
    mailroom.consume(ack=True)
    mailroom.drain(1)
    mailroom.connection.close()
    successor = Mailroom(other_connection, mailroom.queue)
    successor.consume(ack=True)
    drain_idle(other_connection)
    assert successor.received == []


def test_a_rejected_message_is_gone(mailroom: Mailroom, other_connection: Connection) -> None:
    mailroom.publish("unwanted")
    mailroom.consume()
    mailroom.drain(1)
    mailroom.received[0].reject()
    mailroom.connection.close()
    assert Mailroom(other_connection, mailroom.queue).count() == 0


def test_a_requeued_message_comes_again(mailroom: Mailroom) -> None:
    mailroom.publish("again")
    mailroom.consume()
    mailroom.drain(1)
    mailroom.received[0].requeue()
    assert mailroom.drain(2) == ["again", "again"]


def test_a_requeued_message_keeps_its_place(mailroom: Mailroom, broker: Broker) -> None:
    mailroom.publish(0, 1, 2)
    consumer = mailroom.consume(prefetch_count=1)
    mailroom.drain(1)
    mailroom.received.pop().requeue()
    consumer.cancel()
    mailroom.consume(ack=True)
    assert mailroom.drain(3) == broker.expected("requeued order", [0, 1, 2])


@pytest.mark.parametrize("settle", ["ack", "reject", "requeue"])
def test_a_message_is_settled_once(mailroom: Mailroom, settle: str) -> None:
    mailroom.publish("x")
    mailroom.consume()
    mailroom.drain(1)
    mailroom.received[0].ack()
    assert mailroom.received[0].acknowledged
    with pytest.raises(MessageStateError):
        getattr(mailroom.received[0], settle)()


def test_without_acks_nothing_is_in_hand(mailroom: Mailroom, other_connection: Connection) -> None:
    mailroom.publish(1, 2)
    mailroom.consume(no_ack=True)
    mailroom.drain(2)
    mailroom.connection.close()
    assert Mailroom(other_connection, mailroom.queue).count() == 0


@pytest.mark.parametrize("limit", [1, 3])
def test_prefetch_is_honoured(mailroom: Mailroom, limit: int) -> None:
    mailroom.publish(*range(limit + 3))
    mailroom.consume(prefetch_count=limit)
    mailroom.drain(limit)
    drain_idle(mailroom.connection)
    assert mailroom.bodies == list(range(limit))
    # One acknowledged makes room for one more.
    mailroom.received[0].ack()
    mailroom.drain(limit + 1)
    drain_idle(mailroom.connection)
    assert mailroom.bodies == list(range(limit + 1))


def test_prefetch_can_be_raised_while_consuming(mailroom: Mailroom) -> None:
    mailroom.publish(*range(6))
    consumer = mailroom.consume(prefetch_count=1)
    mailroom.drain(1)
    consumer.qos(prefetch_count=4)
    mailroom.drain(4)
    drain_idle(mailroom.connection)
    assert mailroom.bodies == [0, 1, 2, 3]


def test_closing_the_channel_requeues_what_is_unacknowledged(
    mailroom: Mailroom, other_connection: Connection, broker: Broker
) -> None:
    mailroom.publish(0, 1, 2, 3)
    mailroom.consume(prefetch_count=3)
    mailroom.drain(3)
    mailroom.received[1].ack()
    mailroom.channel.close()
    successor = Mailroom(other_connection, mailroom.queue)
    successor.consume(ack=True)
    assert successor.drain(3) == broker.expected("order after channel close", [0, 2, 3])


def test_closing_the_connection_requeues_what_is_unacknowledged(
    mailroom: Mailroom, other_connection: Connection, broker: Broker
) -> None:
    mailroom.publish(*range(5))
    mailroom.consume(prefetch_count=2)
    mailroom.drain(2)
    mailroom.connection.close()
    successor = Mailroom(other_connection, mailroom.queue)
    successor.consume(ack=True)
    assert successor.drain(5) == broker.expected("order after connection close", [0, 1, 2, 3, 4])


def test_a_returned_message_says_that_it_is_redelivered(
    mailroom: Mailroom, other_connection: Connection
) -> None:
    mailroom.publish("x")
    mailroom.consume()
    mailroom.drain(1)
    assert not mailroom.received[0].delivery_info.get("redelivered")
    mailroom.channel.close()
    successor = Mailroom(other_connection, mailroom.queue)
    successor.consume(ack=True)
    successor.drain(1)
    message = successor.received[0]
    assert (
        message.delivery_info.get("redelivered")
        or message.properties.get("redelivered")
        or message.headers.get("redelivered")
    )


def test_recover_requeues_on_the_same_channel(mailroom: Mailroom) -> None:
    mailroom.publish("x")
    consumer = mailroom.consume()
    mailroom.drain(1)
    consumer.recover(requeue=True)
    mailroom.drain(2)
    mailroom.received[1].ack()
    assert mailroom.bodies == ["x", "x"]


def test_a_cancelled_consumer_gets_nothing_more(mailroom: Mailroom, other_connection: Connection) -> None:
    mailroom.publish(1)
    consumer = mailroom.consume(ack=True)
    mailroom.drain(1)
    consumer.cancel()
    Mailroom(other_connection, mailroom.queue).publish(2)
    drain_idle(mailroom.connection)
    assert mailroom.bodies == [1]
    assert mailroom.count() == 1


def test_what_was_in_hand_can_be_acknowledged_after_cancel(
    mailroom: Mailroom, other_connection: Connection
) -> None:
    mailroom.publish(1)
    consumer = mailroom.consume()
    mailroom.drain(1)
    consumer.cancel()
    mailroom.received[0].ack()
    mailroom.connection.close()
    assert Mailroom(other_connection, mailroom.queue).count() == 0


def test_basic_get(mailroom: Mailroom, other_connection: Connection) -> None:
    assert mailroom.bound.get() is None
    mailroom.publish("a", "b", "c")
    first, second = mailroom.bound.get(), mailroom.bound.get(no_ack=True)
    assert first is not None
    assert second is not None
    assert [first.payload, second.payload] == ["a", "b"]
    # What was got with acks and not acknowledged returns with the channel.
    mailroom.channel.close()
    successor = Mailroom(other_connection, mailroom.queue)
    successor.consume(ack=True)
    assert successor.drain(2) == ["a", "c"]


def test_an_exception_in_a_callback_reaches_the_caller_and_blocks_nobody(
    mailroom: Mailroom, other_connection: Connection
) -> None:
    mailroom.publish(*range(5))
    seen: list[Any] = []

    def on_message(message: Message) -> None:
        seen.append(message.payload)
        if message.payload == 1:
            raise LookupError("callback failed")
        message.ack()

    consumer = Consumer(mailroom.channel, queues=[mailroom.queue], on_message=on_message)
    consumer.consume()
    with pytest.raises(LookupError):
        drain_until(mailroom.connection, lambda: len(seen) == 5)
    drain_until(mailroom.connection, lambda: len(seen) == 5)
    assert seen == [0, 1, 2, 3, 4]
    # The one that failed was not acknowledged: it is not lost.
    mailroom.connection.close()
    successor = Mailroom(other_connection, mailroom.queue)
    successor.consume(ack=True)
    assert successor.drain(1) == [1]


def test_two_consumers_on_one_connection(connection: Connection, queue_name: str) -> None:
    rooms = [Mailroom(connection, f"{queue_name}-{letter}") for letter in "ab"]
    for room in rooms:
        room.consume(ack=True)
    rooms[0].publish(1, 2)
    rooms[1].publish(3, 4)
    drain_until(connection, lambda: all(len(room.received) == 2 for room in rooms))
    assert [room.bodies for room in rooms] == [[1, 2], [3, 4]]


def test_one_consumer_of_many_queues_serves_all(connection: Connection, queue_name: str) -> None:
    queues = [Queue(f"{queue_name}-{number}") for number in range(5)]
    rooms = [Mailroom(connection, queue) for queue in queues]
    for room in rooms:
        room.publish(*([room.queue.name] * 4))
    got: list[Any] = []

    def on_message(message: Message) -> None:
        got.append(message.payload)
        message.ack()

    with Consumer(connection.channel(), queues=queues, on_message=on_message, prefetch_count=1):
        drain_until(connection, lambda: len(got) == 20)
    assert sorted(got) == sorted([queue.name for queue in queues] * 4)
    # Nobody's first message waits for all of another queue.
    assert len(set(got[:10])) == 5


def test_two_connections_share_a_queue_without_overlap(
    connection: Connection, other_connection: Connection, queue_name: str
) -> None:
    rooms = [Mailroom(connection, queue_name), Mailroom(other_connection, queue_name)]
    rooms[0].publish(*range(40))
    for room in rooms:
        room.consume(ack=True, prefetch_count=1)

    def all_here() -> bool:
        for room in rooms:
            drain_idle(room.connection, timeout=0.05)
        return sum(len(room.received) for room in rooms) >= 40

    drain_until(connection, all_here)
    assert sorted(rooms[0].bodies + rooms[1].bodies) == list(range(40))


def test_acknowledging_from_another_thread(mailroom: Mailroom, other_connection: Connection) -> None:
    mailroom.publish(*range(20))
    mailroom.consume(prefetch_count=4)
    acked: list[int] = []

    def acknowledge(message: Message) -> None:
        message.ack()
        acked.append(message.payload)

    def turn() -> bool:
        todo = [message for message in mailroom.received if not message.acknowledged]
        threads = [threading.Thread(target=acknowledge, args=(message,)) for message in todo]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(acked) == 20

    drain_until(mailroom.connection, turn)
    mailroom.connection.close()
    assert Mailroom(other_connection, mailroom.queue).count() == 0


def test_publishing_from_threads(broker_url: str, mailroom: Mailroom) -> None:
    def publish(first: int) -> None:
        with Connection(broker_url) as own:
            Mailroom(own, mailroom.queue).publish(*range(first, first + 25))

    threads = [threading.Thread(target=publish, args=(first,)) for first in range(0, 100, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mailroom.consume(ack=True)
    got = mailroom.drain(100)
    assert sorted(got) == list(range(100))
    # Each thread's own messages keep their order.
    for first in range(0, 100, 25):
        assert [body for body in got if first <= body < first + 25] == list(range(first, first + 25))


def test_a_big_body(mailroom: Mailroom, broker: Broker) -> None:
    body = "x" * 3_000_000
    if broker.expected("a body of three megabytes", "taken") == "refused":
        with pytest.raises(ValueError, match=r"^30001\d\d bytes for"):  # some are the queue's name
            mailroom.publish(body)
        body = body[:1_000_000]
    mailroom.publish(body)
    mailroom.consume(ack=True)
    assert mailroom.drain(1) == [body]
