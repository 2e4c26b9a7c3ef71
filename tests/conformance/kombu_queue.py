"""The common steps of the kombu-level tests: publish to one queue, and drain until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Message, Producer, Queue

from tests.brokers import ACTIVE

#: The database of the kombu-level tests; the Celery-level ones use others, so that killing the connections
#: of one level does not disturb the other.
KOMBU_DB = 0

#: For tests that cut off or restart a Redis server, or need features that Celery has on Redis only.
#: The corresponding tests on ZooKeeper are in tests/zookeeper_transport.
on_redis = pytest.mark.parametrize("broker", ACTIVE, indirect=True)


def drain_until(connection: Connection, condition: Callable[[], object], deadline: float = 30.0) -> None:
    """Drain `connection` until `condition` holds; TimeoutError after `deadline` seconds."""
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not reached within {deadline} s")
        try:
            connection.drain_events(timeout=0.2)
        except TimeoutError:
            continue


def drain_idle(connection: Connection, timeout: float = 0.3) -> None:
    """Drain `connection` until no message has come for `timeout` seconds."""
    while True:
        try:
            connection.drain_events(timeout=timeout)
        except TimeoutError:
            return


def kill_connections(port: int, db: int = KOMBU_DB) -> int:
    """CLIENT KILL every connection to database `db`, except this one; return the number of them."""
    with redis.Redis(port=port, db=15) as client:
        victims = [row["id"] for row in client.client_list() if int(row["db"]) == db]
        for victim in victims:
            client.client_kill_filter(_id=victim)
    return len(victims)


class KombuQueue:
    """One queue on one connection."""

    def __init__(self, connection: Connection, queue: str | Queue) -> None:
        self.connection = connection
        self.queue = queue if isinstance(queue, Queue) else Queue(queue)
        self.channel: Any = connection.channel()
        self.producer = Producer(self.channel)
        self.bound = self.queue(self.channel)
        self.bound.declare()
        self.received: list[Message] = []

    @property
    def bodies(self) -> list[Any]:
        """The decoded bodies received so far."""
        return [message.payload for message in self.received]

    def publish(self, *bodies: Any, **options: Any) -> None:
        options.setdefault("serializer", "json")
        options.setdefault("routing_key", self.queue.name)
        for body in bodies:
            self.producer.publish(body, **options)

    def consume(self, *, ack: bool = False, channel: Any = None, **options: Any) -> Consumer:
        """Start a consumer that stores messages in `received`; `ack` acknowledges each at once."""

        def on_message(message: Message) -> None:
            self.received.append(message)
            if ack:
                message.ack()

        consumer = Consumer(
            channel or self.channel, queues=[self.queue], on_message=on_message, auto_declare=False, **options
        )
        consumer.consume()
        return consumer

    def drain(self, amount: int, deadline: float = 30.0) -> list[Any]:
        """Drain the connection until `amount` messages came; return all bodies so far."""
        drain_until(self.connection, lambda: len(self.received) >= amount, deadline)
        return self.bodies

    def count(self) -> int:
        """The number of waiting messages, by a passive declare on a new channel; 0 after a 404."""
        channel: Any = self.connection.channel()
        try:
            declared: Any = self.queue(channel).queue_declare(passive=True)
            return int(declared.message_count)
        except self.connection.channel_errors as exc:
            if int(getattr(exc, "reply_code", 0)) != 404:
                raise
            return 0
        finally:
            channel.close()
