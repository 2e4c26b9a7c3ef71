"""Publishing, consuming, acknowledging: the messages in flight, and their return."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from kombu import Connection, Consumer, Message, Queue
from kombu.exceptions import MessageStateError

from tests.brokers import Broker
from tests.conformance.kombu_queue import KombuQueue, drain_idle, drain_until


def test_messages_arrive_in_the_order_of_publishing(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish(*range(100))
    kombu_queue.consume(ack=True)
    assert kombu_queue.drain(100) == list(range(100))


def test_an_acknowledged_message_is_gone(kombu_queue: KombuQueue, other_connection: Connection) -> None:
    kombu_queue.publish("once")
    kombu_queue.consume(ack=True)
    kombu_queue.drain(1)
    kombu_queue.connection.close()
    successor = KombuQueue(other_connection, kombu_queue.queue)
    successor.consume(ack=True)
    drain_idle(other_connection)
    assert successor.received == []


def test_a_rejected_message_is_gone(kombu_queue: KombuQueue, other_connection: Connection) -> None:
    kombu_queue.publish("unwanted")
    kombu_queue.consume()
    kombu_queue.drain(1)
    kombu_queue.received[0].reject()
    kombu_queue.connection.close()
    assert KombuQueue(other_connection, kombu_queue.queue).count() == 0


def test_a_requeued_message_comes_again(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish("again")
    kombu_queue.consume()
    kombu_queue.drain(1)
    kombu_queue.received[0].requeue()
    assert kombu_queue.drain(2) == ["again", "again"]


def test_a_requeued_message_keeps_its_place(kombu_queue: KombuQueue, broker: Broker) -> None:
    kombu_queue.publish(0, 1, 2)
    consumer = kombu_queue.consume(prefetch_count=1)
    kombu_queue.drain(1)
    kombu_queue.received.pop().requeue()
    consumer.cancel()
    kombu_queue.consume(ack=True)
    assert kombu_queue.drain(3) == broker.expected("requeued order", [0, 1, 2])


@pytest.mark.parametrize("settle", ["ack", "reject", "requeue"])
def test_a_message_is_settled_once(kombu_queue: KombuQueue, settle: str) -> None:
    kombu_queue.publish("x")
    kombu_queue.consume()
    kombu_queue.drain(1)
    kombu_queue.received[0].ack()
    assert kombu_queue.received[0].acknowledged
    with pytest.raises(MessageStateError):
        getattr(kombu_queue.received[0], settle)()


def test_without_acks_nothing_is_in_hand(kombu_queue: KombuQueue, other_connection: Connection) -> None:
    kombu_queue.publish(1, 2)
    kombu_queue.consume(no_ack=True)
    kombu_queue.drain(2)
    kombu_queue.connection.close()
    assert KombuQueue(other_connection, kombu_queue.queue).count() == 0


@pytest.mark.parametrize("limit", [1, 3])
def test_prefetch_is_honoured(kombu_queue: KombuQueue, limit: int) -> None:
    kombu_queue.publish(*range(limit + 3))
    kombu_queue.consume(prefetch_count=limit)
    kombu_queue.drain(limit)
    drain_idle(kombu_queue.connection)
    assert kombu_queue.bodies == list(range(limit))
    # An ack frees a place in the prefetch window.
    kombu_queue.received[0].ack()
    kombu_queue.drain(limit + 1)
    drain_idle(kombu_queue.connection)
    assert kombu_queue.bodies == list(range(limit + 1))


def test_prefetch_can_be_raised_while_consuming(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish(*range(6))
    consumer = kombu_queue.consume(prefetch_count=1)
    kombu_queue.drain(1)
    consumer.qos(prefetch_count=4)
    kombu_queue.drain(4)
    drain_idle(kombu_queue.connection)
    assert kombu_queue.bodies == [0, 1, 2, 3]


def test_closing_the_channel_requeues_unacknowledged_messages(
    kombu_queue: KombuQueue, other_connection: Connection, broker: Broker
) -> None:
    kombu_queue.publish(0, 1, 2, 3)
    kombu_queue.consume(prefetch_count=3)
    kombu_queue.drain(3)
    kombu_queue.received[1].ack()
    kombu_queue.channel.close()
    successor = KombuQueue(other_connection, kombu_queue.queue)
    successor.consume(ack=True)
    assert successor.drain(3) == broker.expected("order after channel close", [0, 2, 3])


def test_closing_the_connection_requeues_unacknowledged_messages(
    kombu_queue: KombuQueue, other_connection: Connection, broker: Broker
) -> None:
    kombu_queue.publish(*range(5))
    kombu_queue.consume(prefetch_count=2)
    kombu_queue.drain(2)
    kombu_queue.connection.close()
    successor = KombuQueue(other_connection, kombu_queue.queue)
    successor.consume(ack=True)
    assert successor.drain(5) == broker.expected("order after connection close", [0, 1, 2, 3, 4])


def test_a_returned_message_reports_that_it_is_redelivered(
    kombu_queue: KombuQueue, other_connection: Connection
) -> None:
    kombu_queue.publish("x")
    kombu_queue.consume()
    kombu_queue.drain(1)
    assert not kombu_queue.received[0].delivery_info.get("redelivered")
    kombu_queue.channel.close()
    successor = KombuQueue(other_connection, kombu_queue.queue)
    successor.consume(ack=True)
    successor.drain(1)
    message = successor.received[0]
    assert (
        message.delivery_info.get("redelivered")
        or message.properties.get("redelivered")
        or message.headers.get("redelivered")
    )


def test_recover_requeues_on_the_same_channel(kombu_queue: KombuQueue) -> None:
    kombu_queue.publish("x")
    consumer = kombu_queue.consume()
    kombu_queue.drain(1)
    consumer.recover(requeue=True)
    kombu_queue.drain(2)
    kombu_queue.received[1].ack()
    assert kombu_queue.bodies == ["x", "x"]


def test_a_cancelled_consumer_gets_nothing_more(
    kombu_queue: KombuQueue, other_connection: Connection
) -> None:
    kombu_queue.publish(1)
    consumer = kombu_queue.consume(ack=True)
    kombu_queue.drain(1)
    consumer.cancel()
    KombuQueue(other_connection, kombu_queue.queue).publish(2)
    drain_idle(kombu_queue.connection)
    assert kombu_queue.bodies == [1]
    assert kombu_queue.count() == 1


def test_a_delivered_message_can_be_acknowledged_after_cancel(
    kombu_queue: KombuQueue, other_connection: Connection
) -> None:
    kombu_queue.publish(1)
    consumer = kombu_queue.consume()
    kombu_queue.drain(1)
    consumer.cancel()
    kombu_queue.received[0].ack()
    kombu_queue.connection.close()
    assert KombuQueue(other_connection, kombu_queue.queue).count() == 0


def test_basic_get(kombu_queue: KombuQueue, other_connection: Connection) -> None:
    assert kombu_queue.bound.get() is None
    kombu_queue.publish("a", "b", "c")
    first, second = kombu_queue.bound.get(), kombu_queue.bound.get(no_ack=True)
    assert first is not None
    assert second is not None
    assert [first.payload, second.payload] == ["a", "b"]
    # A fetched, unacknowledged message returns when the channel closes.
    kombu_queue.channel.close()
    successor = KombuQueue(other_connection, kombu_queue.queue)
    successor.consume(ack=True)
    assert successor.drain(2) == ["a", "c"]


def test_an_exception_in_a_callback_reaches_the_caller_and_blocks_no_message(
    kombu_queue: KombuQueue, other_connection: Connection
) -> None:
    kombu_queue.publish(*range(5))
    seen: list[Any] = []

    def on_message(message: Message) -> None:
        seen.append(message.payload)
        if message.payload == 1:
            raise LookupError("callback failed")
        message.ack()

    consumer = Consumer(kombu_queue.channel, queues=[kombu_queue.queue], on_message=on_message)
    consumer.consume()
    with pytest.raises(LookupError):
        drain_until(kombu_queue.connection, lambda: len(seen) == 5)
    drain_until(kombu_queue.connection, lambda: len(seen) == 5)
    assert seen == [0, 1, 2, 3, 4]
    # The message whose callback failed was not acknowledged, so it is not lost.
    kombu_queue.connection.close()
    successor = KombuQueue(other_connection, kombu_queue.queue)
    successor.consume(ack=True)
    assert successor.drain(1) == [1]


def test_two_consumers_on_one_connection(connection: Connection, queue_name: str) -> None:
    rooms = [KombuQueue(connection, f"{queue_name}-{letter}") for letter in "ab"]
    for room in rooms:
        room.consume(ack=True)
    rooms[0].publish(1, 2)
    rooms[1].publish(3, 4)
    drain_until(connection, lambda: all(len(room.received) == 2 for room in rooms))
    assert [room.bodies for room in rooms] == [[1, 2], [3, 4]]


def test_one_consumer_of_many_queues_serves_all(connection: Connection, queue_name: str) -> None:
    queues = [Queue(f"{queue_name}-{number}") for number in range(5)]
    rooms = [KombuQueue(connection, queue) for queue in queues]
    for room in rooms:
        room.publish(*([room.queue.name] * 4))
    got: list[Any] = []

    def on_message(message: Message) -> None:
        got.append(message.payload)
        message.ack()

    with Consumer(connection.channel(), queues=queues, on_message=on_message, prefetch_count=1):
        drain_until(connection, lambda: len(got) == 20)
    assert sorted(got) == sorted([queue.name for queue in queues] * 4)
    # The first message of no queue waits for all messages of another queue.
    assert len(set(got[:10])) == 5


def test_two_connections_share_a_queue_without_overlap(
    connection: Connection, other_connection: Connection, queue_name: str
) -> None:
    rooms = [KombuQueue(connection, queue_name), KombuQueue(other_connection, queue_name)]
    rooms[0].publish(*range(40))
    for room in rooms:
        room.consume(ack=True, prefetch_count=1)

    def all_here() -> bool:
        for room in rooms:
            drain_idle(room.connection, timeout=0.05)
        return sum(len(room.received) for room in rooms) >= 40

    drain_until(connection, all_here)
    assert sorted(rooms[0].bodies + rooms[1].bodies) == list(range(40))


def test_acknowledging_from_another_thread(kombu_queue: KombuQueue, other_connection: Connection) -> None:
    kombu_queue.publish(*range(20))
    kombu_queue.consume(prefetch_count=4)
    acked: list[int] = []

    def acknowledge(message: Message) -> None:
        message.ack()
        acked.append(message.payload)

    def turn() -> bool:
        todo = [message for message in kombu_queue.received if not message.acknowledged]
        threads = [threading.Thread(target=acknowledge, args=(message,)) for message in todo]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(acked) == 20

    drain_until(kombu_queue.connection, turn)
    kombu_queue.connection.close()
    assert KombuQueue(other_connection, kombu_queue.queue).count() == 0


def test_publishing_from_threads(broker_url: str, kombu_queue: KombuQueue) -> None:
    def publish(first: int) -> None:
        with Connection(broker_url) as own:
            KombuQueue(own, kombu_queue.queue).publish(*range(first, first + 25))

    threads = [threading.Thread(target=publish, args=(first,)) for first in range(0, 100, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kombu_queue.consume(ack=True)
    got = kombu_queue.drain(100)
    assert sorted(got) == list(range(100))
    # Each thread's own messages keep their order.
    for first in range(0, 100, 25):
        assert [body for body in got if first <= body < first + 25] == list(range(first, first + 25))


def test_a_big_body(kombu_queue: KombuQueue, broker: Broker) -> None:
    body = "x" * 3_000_000
    if broker.expected("a body of three megabytes", "taken") == "refused":
        with pytest.raises(ValueError, match=r"^30001\d\d bytes for"):  # the size includes the queue's name
            kombu_queue.publish(body)
        body = body[:1_000_000]
    kombu_queue.publish(body)
    kombu_queue.consume(ack=True)
    assert kombu_queue.drain(1) == [body]
