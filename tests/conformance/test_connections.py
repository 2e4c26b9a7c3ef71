"""Connections: opening, failover, loss, and fork."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from billiard import Process
from kombu import Connection, Producer
from kombu.exceptions import OperationalError
from kombu.pools import producers

from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from tests.brokers import Broker
from tests.conformance.kombu_queue import (
    KOMBU_DB,
    KombuQueue,
    drain_idle,
    drain_until,
    kill_connections,
    on_redis,
)


@pytest.fixture
def dead_url(broker: Broker) -> Iterator[str]:
    """The URL of a port on which no server listens, or of a file that cannot be made."""
    if broker.server == "file":
        yield f"{broker.scheme}:////no-such-folder/queues"
        return
    with dead_port() as port:
        yield broker.url(port)


def acknowledge_and_drain(kombu_queue: KombuQueue) -> None:
    """Acknowledge a message and consume on: a cut connection raises, or brings the next message."""
    connection, amount = kombu_queue.connection, len(kombu_queue.received) + 1
    end = time.monotonic() + 15
    with contextlib.suppress(*connection.connection_errors, *connection.channel_errors):
        kombu_queue.received[0].ack()
        kombu_queue.drain(amount, 15)
    assert time.monotonic() < end, "neither"


def test_connecting_to_a_dead_port_is_an_operational_error(dead_url: str) -> None:
    with Connection(dead_url) as connection, pytest.raises(OperationalError):
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


@pytest.mark.parametrize("form", ["semicolon", "list"])
def test_the_second_of_a_failover_list_is_used(
    dead_url: str, broker_url: str, queue_name: str, form: str
) -> None:
    urls: Any = f"{dead_url};{broker_url}" if form == "semicolon" else [dead_url, broker_url]
    with Connection(urls) as connection:
        connection.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
        room = KombuQueue(connection, queue_name)
        room.publish("hello")
        room.consume(ack=True)
        assert room.drain(1) == ["hello"]


def test_a_password_is_not_shown(broker: Broker) -> None:
    shown = Connection(f"{broker.scheme}://:secret@localhost:6379/0").as_uri()
    assert "secret" not in shown
    assert shown.startswith(f"{broker.scheme}://")


# Not on stock, which raises an AttributeError of kombu.
@pytest.mark.parametrize("broker", ["dq", "zookeeper", "sqlite"], indirect=True)
def test_publishing_on_a_closed_channel_is_an_error_of_the_connection(
    connection: Connection, queue_name: str
) -> None:
    channel: Any = connection.channel()
    producer = Producer(channel)
    channel.close()
    with pytest.raises(connection.connection_errors):
        producer.publish(1, routing_key=queue_name)


def test_a_closed_connection_opens_again(connection: Connection, queue_name: str) -> None:
    KombuQueue(connection, queue_name).publish(1)
    connection.close()
    assert not connection.connected
    connection.connect()
    room = KombuQueue(connection, queue_name)
    room.consume(ack=True)
    assert room.drain(1) == [1]


def test_the_transport_offers_the_features_that_celery_needs(connection: Connection, broker: Broker) -> None:
    transport = connection.transport
    assert transport.driver_type == broker.driver_type
    assert transport.implements.asynchronous
    assert {"direct", "topic", "fanout"} <= set(transport.implements.exchange_type)
    assert connection.supports_exchange_type("fanout")
    assert transport.driver_version()


@on_redis
def test_a_killed_connection_is_a_connection_error_or_mends(
    kombu_queue: KombuQueue, redis_server: RedisServer, other_connection: Connection
) -> None:
    # Given a consumer with unacknowledged messages
    kombu_queue.publish(*range(6))
    kombu_queue.consume(prefetch_count=2)
    kombu_queue.drain(2)
    # When the server cuts every connection
    assert kill_connections(redis_server.port) >= 1
    acknowledge_and_drain(kombu_queue)
    # Then after reconnecting every message is delivered, at most the acknowledged one excepted.
    kombu_queue.connection.close()
    successor = KombuQueue(other_connection, kombu_queue.queue)
    successor.consume(ack=True)
    drain_until(other_connection, lambda: set(successor.bodies) >= {1, 2, 3, 4, 5})


@on_redis
def test_publishing_with_retry_survives_a_killed_connection(
    kombu_queue: KombuQueue, redis_server: RedisServer
) -> None:
    kombu_queue.publish("before")
    kill_connections(redis_server.port)
    policy = {"max_retries": 5, "interval_start": 0, "interval_step": 0.05}
    kombu_queue.publish("after", retry=True, retry_policy=policy)
    room = KombuQueue(kombu_queue.connection.clone(), kombu_queue.queue)
    with room.connection:
        room.consume(ack=True)
        got = room.drain(2)
    # At least once: a publish without an answer may have been stored.
    assert set(got) == {"before", "after"}


def test_an_acknowledgement_by_the_old_holder_does_not_touch_the_new(
    kombu_queue: KombuQueue, other_connection: Connection, broker_url: str, broker: Broker
) -> None:
    # Given a message that returned when its consumer's connection closed, and that another consumer fetched
    kombu_queue.publish("x")
    kombu_queue.consume()
    kombu_queue.drain(1)
    stale = kombu_queue.received[0]
    kombu_queue.connection.close()
    holder = KombuQueue(other_connection, kombu_queue.queue)
    holder.consume()
    holder.drain(1)
    # When the old consumer acknowledges late (and is ignored or refused), and the new one closes
    with contextlib.suppress(Exception):  # any refusal is right; the ack must only have no effect
        stale.ack()
    other_connection.close()
    # Then the message is still there.
    with Connection(broker_url) as third:
        room = KombuQueue(third, kombu_queue.queue)
        room.consume(ack=True)
        expected = broker.expected("a stale acknowledgement", ["x"])
        room.drain(len(expected))
        drain_idle(third)
        assert room.bodies == expected


def _publish_in_child(url: str, queue: str, inherited: Connection) -> None:
    with Connection(url) as own:
        KombuQueue(own, queue).publish("own connection")
    with producers[inherited].acquire(block=True) as producer:
        producer.publish("inherited pool", routing_key=queue, serializer="json")


def test_a_forked_child_publishes_and_the_parent_goes_on(kombu_queue: KombuQueue, broker_url: str) -> None:
    with producers[kombu_queue.connection].acquire(block=True) as producer:
        producer.publish("parent before", routing_key=kombu_queue.queue.name, serializer="json")
    kombu_queue.consume(ack=True)
    kombu_queue.drain(1)
    child = Process(
        target=_publish_in_child, args=(broker_url, kombu_queue.queue.name, kombu_queue.connection)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    kombu_queue.publish("parent after")
    assert sorted(kombu_queue.drain(4)) == [
        "inherited pool",
        "own connection",
        "parent after",
        "parent before",
    ]


def test_a_forked_child_that_exits_gives_nothing_back(
    kombu_queue: KombuQueue, other_connection: Connection
) -> None:
    # Given a parent that holds a message
    kombu_queue.publish("held")
    kombu_queue.consume()
    kombu_queue.drain(1)
    # When a child that inherited the connection ends
    child = Process(target=int)
    child.start()
    child.join(60)
    # Then the parent still holds it alone.
    assert KombuQueue(other_connection, kombu_queue.queue).count() == 0
    kombu_queue.received[0].ack()
    kombu_queue.connection.close()
    assert KombuQueue(other_connection, kombu_queue.queue).count() == 0


@on_redis
def test_a_broker_restart_with_persistence_loses_nothing(broker: Broker, queue_name: str) -> None:
    with RedisServer(appendonly=True) as server:
        url = broker.url(server.port, KOMBU_DB)
        with Connection(url) as connection:
            room = KombuQueue(connection, queue_name)
            room.publish(*range(10))
            room.consume(prefetch_count=3)
            room.drain(3)
            server.kill()
            server.restart()
            acknowledge_and_drain(room)
            connection.close()
        with Connection(url) as connection:
            room = KombuQueue(connection, queue_name)
            room.consume(ack=True)
            drain_until(connection, lambda: set(room.bodies) >= set(range(1, 10)))


@on_redis
def test_a_producer_on_a_closed_server_fails_in_bounded_time(broker: Broker, queue_name: str) -> None:
    with RedisServer() as server, Connection(broker.url(server.port)) as connection:
        producer = Producer(connection.channel())
        producer.publish("x", routing_key=queue_name)
        server.kill()
        with pytest.raises((*connection.connection_errors, OperationalError)):
            producer.publish("y", routing_key=queue_name)
