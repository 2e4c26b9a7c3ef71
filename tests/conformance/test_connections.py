"""Connecting, failing over, being cut off, and forking."""

from __future__ import annotations

import contextlib
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
from tests.conformance.mailroom import KOMBU_DB, Mailroom, drain_idle, drain_until, kill_connections, on_redis


@pytest.fixture
def dead_url(broker: Broker) -> Iterator[str]:
    """The URL of a port that nobody listens on."""
    with dead_port() as port:
        yield broker.url(port)


def acknowledge_and_drain(mailroom: Mailroom) -> None:
    """Acknowledge one message and go on consuming: on a dead connection one of the two must raise."""
    mailroom.received[0].ack()
    drain_until(mailroom.connection, lambda: False, deadline=15)


def test_connecting_to_nobody_is_an_operational_error(dead_url: str) -> None:
    with Connection(dead_url) as connection, pytest.raises(OperationalError):
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


@pytest.mark.parametrize("form", ["semicolon", "list"])
def test_the_second_of_a_failover_list_is_used(
    dead_url: str, broker_url: str, queue_name: str, form: str
) -> None:
    urls: Any = f"{dead_url};{broker_url}" if form == "semicolon" else [dead_url, broker_url]
    with Connection(urls) as connection:
        connection.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
        room = Mailroom(connection, queue_name)
        room.publish("hello")
        room.consume(ack=True)
        assert room.drain(1) == ["hello"]


def test_a_password_is_not_shown(broker: Broker) -> None:
    shown = Connection(f"{broker.scheme}://:secret@localhost:6379/0").as_uri()
    assert "secret" not in shown
    assert shown.startswith(f"{broker.scheme}://")


def test_a_closed_connection_opens_again(connection: Connection, queue_name: str) -> None:
    Mailroom(connection, queue_name).publish(1)
    connection.close()
    assert not connection.connected
    connection.connect()
    room = Mailroom(connection, queue_name)
    room.consume(ack=True)
    assert room.drain(1) == [1]


def test_the_transport_offers_what_celery_asks_for(connection: Connection, broker: Broker) -> None:
    transport = connection.transport
    assert transport.driver_type == broker.driver_type
    assert transport.implements.asynchronous
    assert {"direct", "topic", "fanout"} <= set(transport.implements.exchange_type)
    assert connection.supports_exchange_type("fanout")
    assert transport.driver_version()


@on_redis
def test_a_killed_connection_is_a_connection_error_and_mends(
    mailroom: Mailroom, redis_server: RedisServer, other_connection: Connection
) -> None:
    # Given a consumer with messages in hand
    mailroom.publish(*range(6))
    mailroom.consume(prefetch_count=2)
    mailroom.drain(2)
    # When the server cuts every connection
    assert kill_connections(redis_server.port) >= 1
    connection = mailroom.connection
    with pytest.raises(connection.connection_errors + connection.channel_errors):
        acknowledge_and_drain(mailroom)
    # Then after reconnecting every message is delivered, at most the acknowledged one excepted.
    connection.close()
    successor = Mailroom(other_connection, mailroom.queue)
    successor.consume(ack=True)
    drain_until(other_connection, lambda: set(successor.bodies) >= {1, 2, 3, 4, 5})


@on_redis
def test_publishing_with_retry_survives_a_killed_connection(
    mailroom: Mailroom, redis_server: RedisServer
) -> None:
    mailroom.publish("before")
    kill_connections(redis_server.port)
    policy = {"max_retries": 5, "interval_start": 0, "interval_step": 0.05}
    mailroom.publish("after", retry=True, retry_policy=policy)
    room = Mailroom(mailroom.connection.clone(), mailroom.queue)
    with room.connection:
        room.consume(ack=True)
        got = room.drain(2)
    # At least once: a reply that was cut off may have been stored.
    assert set(got) == {"before", "after"}


def test_an_acknowledgement_by_the_old_holder_does_not_touch_the_new(
    mailroom: Mailroom, other_connection: Connection, broker_url: str, broker: Broker
) -> None:
    # Given a message that returned when its holder's connection closed, and that another one fetched
    mailroom.publish("x")
    mailroom.consume()
    mailroom.drain(1)
    stale = mailroom.received[0]
    mailroom.connection.close()
    holder = Mailroom(other_connection, mailroom.queue)
    holder.consume()
    holder.drain(1)
    # When the old holder acknowledges late (and is ignored or refused), and the new one goes away
    with contextlib.suppress(Exception):  # any refusal will do; that it has no effect is what matters
        stale.ack()
    other_connection.close()
    # Then the message is still there.
    with Connection(broker_url) as third:
        room = Mailroom(third, mailroom.queue)
        room.consume(ack=True)
        expected = broker.expected("a stale acknowledgement", ["x"])
        room.drain(len(expected))
        drain_idle(third)
        assert room.bodies == expected


def _publish_in_child(url: str, queue: str, inherited: Connection) -> None:
    with Connection(url) as own:
        Mailroom(own, queue).publish("own connection")
    with producers[inherited].acquire(block=True) as producer:
        producer.publish("inherited pool", routing_key=queue, serializer="json")


def test_a_forked_child_publishes_and_the_parent_goes_on(mailroom: Mailroom, broker_url: str) -> None:
    with producers[mailroom.connection].acquire(block=True) as producer:
        producer.publish("parent before", routing_key=mailroom.queue.name, serializer="json")
    mailroom.consume(ack=True)
    mailroom.drain(1)
    child = Process(target=_publish_in_child, args=(broker_url, mailroom.queue.name, mailroom.connection))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    mailroom.publish("parent after")
    assert sorted(mailroom.drain(4)) == ["inherited pool", "own connection", "parent after", "parent before"]


def test_a_forked_child_that_exits_gives_nothing_back(
    mailroom: Mailroom, other_connection: Connection
) -> None:
    # Given a parent that holds a message
    mailroom.publish("held")
    mailroom.consume()
    mailroom.drain(1)
    # When a child that inherited the connection ends
    child = Process(target=int)
    child.start()
    child.join(60)
    # Then the parent still holds it alone.
    assert Mailroom(other_connection, mailroom.queue).count() == 0
    mailroom.received[0].ack()
    mailroom.connection.close()
    assert Mailroom(other_connection, mailroom.queue).count() == 0


@on_redis
def test_a_broker_restart_with_persistence_loses_nothing(broker: Broker, queue_name: str) -> None:
    with RedisServer(appendonly=True) as server:
        url = broker.url(server.port, KOMBU_DB)
        with Connection(url) as connection:
            room = Mailroom(connection, queue_name)
            room.publish(*range(10))
            room.consume(prefetch_count=3)
            room.drain(3)
            server.kill()
            server.restart()
            with pytest.raises(connection.connection_errors + connection.channel_errors):
                acknowledge_and_drain(room)
            connection.close()
        with Connection(url) as connection:
            room = Mailroom(connection, queue_name)
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
