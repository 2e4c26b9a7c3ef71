"""Consumers of many queues: they begin together, in few round trips."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import kombu
import pytest

from celery_dq.errors import ConfigurationError
from celery_dq.testing.waiting import wait_until
from tests.broker.kombu_client import KombuClient

NAMES = [f"q{number}" for number in range(100)]


def reads(kombu_client: KombuClient) -> int:
    """How often the server has read from its clients."""
    return int(kombu_client.client.info("stats")["total_reads_processed"])


def drain_until(connection: Any, condition: Any) -> None:
    """Drain the connection until the condition holds."""

    def drained() -> bool:
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.05)
        return bool(condition())

    wait_until(drained)


def publish_each(kombu_client: KombuClient, connection: Any, names: list[str]) -> None:
    producer = connection.Producer()
    for name in names:
        producer.publish(name, routing_key=name, declare=[kombu.Queue(name)], serializer="json")


@pytest.mark.parametrize("quota", [None, "5/s"])
def test_many_consumers_begin_in_few_round_trips(kombu_client: KombuClient, quota: str | None) -> None:
    options = {"default_quota": {"rate": quota}} if quota else {}
    with kombu_client.connect(**options) as connection:
        got: list[Any] = []
        consumer = connection.Consumer([kombu.Queue(name) for name in NAMES], on_message=got.append)
        before = reads(kombu_client)
        consumer.consume()
        assert reads(kombu_client) - before < len(NAMES) / 2
        publish_each(kombu_client, connection, NAMES)
        drain_until(connection, lambda: len(got) == len(NAMES))
        stored = [kombu_client.client.keys(f"*{name}*quotas*") for name in NAMES]
        assert all(stored) if quota else not any(stored)


def test_a_consumer_without_an_answer_begins_with_the_next_turn(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection:
        got: list[Any] = []
        connection.default_channel.basic_consume("push", True, got.append, "1", nowait=True)
        publish_each(kombu_client, connection, ["push"])
        drain_until(connection, lambda: got)


def test_a_consumer_that_is_cancelled_before_it_began_never_begins(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection:
        channel, got = connection.default_channel, []
        channel.basic_consume("never", True, got.append, "1", nowait=True)
        channel.basic_cancel("1")
        channel.basic_consume("push", True, got.append, "2")
        publish_each(kombu_client, connection, ["never", "push"])
        drain_until(connection, lambda: got)
        assert [message.delivery_info["routing_key"] for message in got] == ["push"]
        assert [queue.name for queue in channel.process.heartbeat.queues.values()] == ["push"]


def test_the_others_begin_when_a_refused_consumer_is_cancelled(kombu_client: KombuClient) -> None:
    with kombu_client.connect(queues={"push": {"partitions": 4}}) as connection:
        got: list[Any] = []
        connection.default_channel.queue_declare("push")
        queues = [kombu.Queue(name) for name in ("before", "push/9", "after")]
        consumer = kombu.Consumer(connection, queues, on_message=got.append, auto_declare=False)
        with pytest.raises(ConfigurationError, match="push/9"):
            consumer.consume()
        consumer.cancel_by_queue("push/9")
        publish_each(kombu_client, connection, ["before", "after"])
        drain_until(connection, lambda: len(got) == 2)
