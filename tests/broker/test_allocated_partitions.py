"""A channel that consumes exactly the partitions that are allocated to its worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.broker.kombu_client import KombuClient
from tests.broker.test_partitions import AT_HOME, FOUR, declare, keys_of, stored


class Served:
    """An allocation that a test changes."""

    def __init__(self, connection: Any, *numbers: int) -> None:
        self.version = 0
        self.counts: dict[str, int] = {}
        self._numbers = frozenset(numbers)
        self._listeners: list[Callable[[], None]] = []
        connection.transport.context.state.allocation = self

    def change(self, *numbers: int) -> None:
        self._numbers = frozenset(numbers)
        self.version += 1
        for listener in self._listeners:
            listener()

    def consumes(self, queue: str, count: int) -> None:
        self.counts[queue] = count

    def served(self, queue: str) -> frozenset[int] | None:
        return self._numbers if queue == "push" else None

    def broker_answered(self) -> None:
        pass

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.remove(listener)


def leased(kombu_client: KombuClient, partitions: int = 4) -> list[int]:
    return [kombu_client.client.zcard(keys.leases) for keys in keys_of(partitions)]


def test_a_consumer_gets_messages_of_exactly_its_partitions(kombu_client: KombuClient) -> None:
    declare(kombu_client, **FOUR)
    with kombu_client.connect(**FOUR) as connection:
        served = Served(connection)
        with kombu_client.consuming(connection) as got:
            assert served.counts == {"push": 4}
            served.change(1, 2)
            kombu_client.drain_until(connection, lambda: leased(kombu_client) == [0, 1, 1, 0])
            for tenant in AT_HOME:
                kombu_client.publish(tenant, tenant=tenant)
            kombu_client.drain(connection, got, 2)
            assert sorted(each.payload for each in got) == sorted(AT_HOME[1:3])
            served.change(0, 1, 3)
            kombu_client.drain(connection, got, 4)
            for each in got:
                each.ack()
            kombu_client.drain_until(connection, lambda: stored(kombu_client) == [0, 0, 0, 0])
            kombu_client.drain_until(connection, lambda: leased(kombu_client) == [1, 1, 0, 1])
            served.change()
            kombu_client.drain_until(connection, lambda: leased(kombu_client) == [0, 0, 0, 0])
            served.change(2)
            kombu_client.publish("again", tenant=AT_HOME[2])
            kombu_client.drain(connection, got, 5)[4].ack()


@pytest.mark.parametrize("prefetch", [1, 0], ids=["in the inbox", "delivered"])
def test_messages_of_a_partition_that_goes_are_released_unless_delivered(
    kombu_client: KombuClient, prefetch: int
) -> None:
    declare(kombu_client, **FOUR)
    sent = sorted([AT_HOME[1], *[AT_HOME[2]] * 3])
    with kombu_client.connect(**FOUR) as connection, kombu_client.connect(**FOUR) as other:
        for tenant in sent:
            kombu_client.publish(tenant, tenant=tenant)
        served = Served(connection, 0, 1, 2, 3)
        with kombu_client.consuming(connection, prefetch) as got:
            kombu_client.drain(connection, got, 1 if prefetch else 4)
            served.change()
            kombu_client.drain_until(
                connection, lambda: sum(leased(kombu_client)) == len({each.payload for each in got})
            )
            with kombu_client.consuming(other) as received:
                kombu_client.drain(other, received, 4 - len(got))
                assert sorted(each.payload for each in (*got, *received)) == sent
                for each in (*got, *received):
                    each.ack()


def test_a_worker_asks_for_the_number_when_it_is_allocated_a_partition_that_it_does_not_know(
    kombu_client: KombuClient,
) -> None:
    declare(kombu_client, **FOUR)
    with kombu_client.connect(**FOUR) as connection:
        served = Served(connection)  # without a partition, no heartbeat brings the number
        with kombu_client.consuming(connection) as got:
            for keys in keys_of(8):
                kombu_client.client.hset(keys.state, "partitions", 8)
            served.change(6)
            kombu_client.drain_until(connection, lambda: leased(kombu_client, 8)[6] == 1)
            assert served.counts == {"push": 8}
            assert not got


def test_a_pinned_partition_is_not_reported_to_the_allocation(kombu_client: KombuClient) -> None:
    declare(kombu_client, **FOUR)
    pinned = KombuClient(kombu_client.url, "push/3")
    with pinned.connect(**FOUR) as connection:
        served = Served(connection)
        with pinned.consuming(connection):
            pinned.drain_until(connection, lambda: leased(kombu_client) == [0, 0, 0, 1])
            assert served.counts == {}
    pinned.close()
