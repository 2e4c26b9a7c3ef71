"""Consumers whose set of partitions changes while they run."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.transport.redis.store.home import home_of
from tests.broker.kombu_client import KombuClient
from tests.broker.test_partitions import FOUR, declare, keys_of, stored

#: One tenant for each of the four partitions.
AT_HOME = [
    next(name for name in (f"shop-{each}" for each in range(100)) if home_of(name, 4) == number)
    for number in range(4)
]


def tag_of(connection: Any) -> str:
    (tag,) = connection.default_channel._consumers
    return str(tag)


def consume_exactly(connection: Any, *numbers: int) -> None:
    channel = connection.default_channel
    partitions = channel.queues("push").partitions
    channel.consumer.consume_exactly(tag_of(connection), [partitions[number] for number in numbers])


def leased(kombu_client: KombuClient) -> list[int]:
    return [kombu_client.client.zcard(keys.leases) for keys in keys_of()]


def test_a_consumer_gets_messages_of_exactly_its_partitions(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**FOUR) as connection, kombu_client.consuming(connection) as got:
        consume_exactly(connection, 1, 2)
        kombu_client.drain_until(connection, lambda: leased(kombu_client) == [0, 1, 1, 0])
        for tenant in AT_HOME:
            kombu_client.publish(tenant, tenant=tenant)
        kombu_client.drain(connection, got, 2)
        assert sorted(each.payload for each in got) == sorted(AT_HOME[1:3])
        consume_exactly(connection, 0, 1, 3)
        kombu_client.drain(connection, got, 4)
        for each in got:
            each.ack()
        kombu_client.drain_until(connection, lambda: stored(kombu_client) == [0, 0, 0, 0])
        kombu_client.drain_until(connection, lambda: leased(kombu_client) == [1, 1, 0, 1])
        consume_exactly(connection)
        kombu_client.drain_until(connection, lambda: leased(kombu_client) == [0, 0, 0, 0])
        consume_exactly(connection, 2)
        kombu_client.publish("again", tenant=AT_HOME[2])
        kombu_client.drain(connection, got, 5)[4].ack()


@pytest.mark.parametrize("prefetch", [1, 0], ids=["in the inbox", "delivered"])
def test_messages_of_a_partition_that_goes_are_released_unless_delivered(
    kombu_client: KombuClient, prefetch: int
) -> None:
    declare(kombu_client, **FOUR)
    with kombu_client.connect(**FOUR) as connection, kombu_client.connect(**FOUR) as other:
        for tenant in (AT_HOME[1], *[AT_HOME[2]] * 3):
            kombu_client.publish(tenant, tenant=tenant)
        with kombu_client.consuming(connection, prefetch) as got:
            kombu_client.drain(connection, got, 1 if prefetch else 4)
            delivered = [each.payload for each in got]
            consume_exactly(connection)
            with kombu_client.consuming(other) as received:
                kombu_client.drain(other, received, 4 - len(got))
                assert sorted(delivered + [each.payload for each in received]) == sorted(
                    [AT_HOME[1], *[AT_HOME[2]] * 3]
                )
                for each in (*got, *received):
                    each.ack()
                kombu_client.drain_until(
                    other, lambda: stored(kombu_client) == [0, 0, 0, 0] or connection.drain_events(timeout=0)
                )
