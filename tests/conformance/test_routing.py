"""Exchanges: direct, topic and fanout, with bindings."""

from __future__ import annotations

import re

from kombu import Connection, Exchange, Producer, Queue
from kombu.transport.virtual.exchange import TopicExchange

from tests.conformance.kombu_queue import KombuQueue, drain_idle, drain_until

#: In kombu 5.5 the word of a ``*`` at the end may have dots in it.
LOOSE_TOPICS = re.match(TopicExchange(None).key_to_pattern("a.*"), "a.b.c") is not None


def test_direct_exchange_delivers_by_routing_key(connection: Connection, queue_name: str) -> None:
    exchange = Exchange(f"{queue_name}-direct", type="direct")
    rooms = [
        KombuQueue(connection, Queue(f"{queue_name}-{key}", exchange, routing_key=key))
        for key in ("red", "blue")
    ]
    producer = Producer(connection.channel(), exchange=exchange)
    for key in ("red", "blue", "green", "red"):
        producer.publish(key, routing_key=key)
    for room in rooms:
        room.consume(ack=True)
    drain_until(connection, lambda: sum(len(room.received) for room in rooms) == 3)
    drain_idle(connection)
    assert [room.bodies for room in rooms] == [["red", "red"], ["blue"]]


def test_a_direct_exchange_with_two_queues_on_one_key_copies(connection: Connection, queue_name: str) -> None:
    exchange = Exchange(f"{queue_name}-direct", type="direct")
    rooms = [
        KombuQueue(connection, Queue(f"{queue_name}-{n}", exchange, routing_key="same")) for n in range(2)
    ]
    Producer(connection.channel(), exchange=exchange).publish("both", routing_key="same")
    for room in rooms:
        room.consume(ack=True)
    drain_until(connection, lambda: all(room.received for room in rooms))
    assert [room.bodies for room in rooms] == [["both"], ["both"]]


def test_one_queue_with_two_bindings(connection: Connection, queue_name: str) -> None:
    from kombu import binding

    exchange = Exchange(f"{queue_name}-direct", type="direct")
    queue = Queue(
        queue_name, bindings=[binding(exchange, routing_key="a"), binding(exchange, routing_key="b")]
    )
    room = KombuQueue(connection, queue)
    producer = Producer(connection.channel(), exchange=exchange)
    for key in "abc":
        producer.publish(key, routing_key=key)
    room.consume(ack=True)
    room.drain(2)
    drain_idle(connection)
    assert sorted(room.bodies) == ["a", "b"]


def test_topic_exchange_matches_words(connection: Connection, queue_name: str) -> None:
    exchange = Exchange(f"{queue_name}-topic", type="topic")
    patterns = {"stock.*": "one", "stock.#": "any", "#.error": "error"}
    rooms = {
        pattern: KombuQueue(connection, Queue(f"{queue_name}-{name}", exchange, routing_key=pattern))
        for pattern, name in patterns.items()
    }
    producer = Producer(connection.channel(), exchange=exchange)
    keys = ["stock.us", "stock.us.error", "weather", "disk.error"]
    for key in keys:
        producer.publish(key, routing_key=key)
    for room in rooms.values():
        room.consume(ack=True)
    drain_until(connection, lambda: sum(len(room.received) for room in rooms.values()) == 5 + LOOSE_TOPICS)
    drain_idle(connection)
    assert {pattern: sorted(room.bodies) for pattern, room in rooms.items()} == {
        "stock.*": ["stock.us", "stock.us.error"] if LOOSE_TOPICS else ["stock.us"],
        "stock.#": ["stock.us", "stock.us.error"],
        "#.error": ["disk.error", "stock.us.error"],
    }


def test_fanout_reaches_every_consumer(
    connection: Connection, other_connection: Connection, queue_name: str, broker_url: str
) -> None:
    exchange = Exchange(f"{queue_name}-fanout", type="fanout")
    rooms = [
        KombuQueue(connection, Queue(f"{queue_name}-1", exchange)),
        KombuQueue(other_connection, Queue(f"{queue_name}-2", exchange)),
    ]
    for room in rooms:
        room.consume(ack=True)
        drain_idle(room.connection)  # subscribes
    with Connection(broker_url) as third:
        producer = Producer(third.channel(), exchange=exchange)
        for number in range(3):
            producer.publish(number)
    for room in rooms:
        assert room.drain(3) == [0, 1, 2]


def test_fanout_beside_a_plain_queue_on_one_connection(
    connection: Connection, other_connection: Connection, queue_name: str
) -> None:
    exchange = Exchange(f"{queue_name}-fanout", type="fanout")
    received = KombuQueue(connection, Queue(f"{queue_name}-received", exchange))
    plain = KombuQueue(connection, queue_name)
    received.consume(no_ack=True)
    plain.consume(ack=True)
    drain_idle(connection)
    Producer(other_connection.channel(), exchange=exchange).publish("to all")
    KombuQueue(other_connection, queue_name).publish("to one")
    drain_until(connection, lambda: bool(received.received and plain.received))
    assert (received.bodies, plain.bodies) == (["to all"], ["to one"])


def test_bindings_of_another_process_are_seen(
    connection: Connection, other_connection: Connection, queue_name: str
) -> None:
    # pidbox replies need this: the worker publishes to a queue that only the caller has declared.
    exchange = Exchange(f"{queue_name}-reply", type="direct", durable=False)
    room = KombuQueue(
        connection, Queue(f"{queue_name}-me", exchange, routing_key="me", durable=False, auto_delete=True)
    )
    Producer(other_connection.channel(), exchange=exchange).publish("answer", routing_key="me")
    room.consume(no_ack=True)
    assert room.drain(1) == ["answer"]
