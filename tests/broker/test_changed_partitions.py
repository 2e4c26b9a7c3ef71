"""Running consumers, while the number of partitions of their queue changes."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest

from celery_dq.keys import PartitionKeys
from celery_dq.transport.redis.store.home import home_of
from celery_dq.transport.redis.store.move_calls import set_map
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.script_calls import load_scripts, run_all
from tests.broker.kombu_client import KombuClient
from tests.broker.test_partitions import FOUR, declare

#: Heartbeats follow each other by a quarter of it.
LEASE: dict[str, Any] = {"lease": 1}
TENANTS = [f"shop-{number}" for number in range(40)]


def set_partitions(kombu_client: KombuClient, count: int, before: int) -> None:
    """Change the number, as ``celery dq partitions`` does for an empty queue."""
    client = kombu_client.client
    stored = PartitionMap.parse((client.hget(kombu_client.keys.state, "partitions") or b"1").decode())
    now = stored.begin(count).end()
    partitions = [
        Partition(PartitionKeys("online", "push", number), load_scripts(), now)
        for number in range(max(count, before))
    ]
    assert set_map(partitions[0], stored, now).run(client) == now
    run_all([each.declare_partitions(now, "follow") for each in partitions[1:]], client)


def consumed(kombu_client: KombuClient, most: int = 12) -> list[int]:
    """The numbers of the partitions on which a consumer has a lease."""
    keys = [PartitionKeys("online", "push", number) for number in range(most)]
    return [each.partition for each in keys if kombu_client.client.exists(each.leases)]


def is_consumed(kombu_client: KombuClient, numbers: list[int]) -> bool:
    return consumed(kombu_client) == numbers


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if getattr(each, "event", "") == name]


def finish_one_each(kombu_client: KombuClient, connection: Any, got: list[Any]) -> None:
    """Publish a message of each tenant, receive them all, and acknowledge them."""
    for tenant in TENANTS:
        kombu_client.publish(tenant, tenant=tenant)
    kombu_client.drain(connection, got, len(TENANTS))
    assert sorted(message.payload for message in got) == sorted(TENANTS)
    for message in got:
        message.ack()
    got.clear()


def test_a_consumer_follows_the_number_of_partitions(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    declare(kombu_client, **FOUR)
    with kombu_client.connect(**LEASE) as connection, kombu_client.consuming(connection) as got:
        for before, count in ((4, 7), (7, 1)):
            finish_one_each(kombu_client, connection, got)
            kombu_client.drain_until(
                connection, lambda: not kombu_client.client.exists(kombu_client.keys.messages)
            )
            set_partitions(kombu_client, count, before)
            now = list(range(count))
            kombu_client.drain_until(connection, partial(is_consumed, kombu_client, now))
        finish_one_each(kombu_client, connection, got)
    assert events(caplog, "partitions_followed")[0].startswith("Queue push has 7 partitions now (before: 4)")
    assert len(events(caplog, "partitions_followed")) == 2


def test_a_consumer_follows_the_answer_to_a_publish_of_its_process(kombu_client: KombuClient) -> None:
    """A refused publish, also of another channel, is news for the consumer: no heartbeat is due soon."""
    declare(kombu_client, **FOUR)
    with kombu_client.connect(lease=600) as connection, kombu_client.consuming(connection) as got:
        kombu_client.drain_until(connection, lambda: consumed(kombu_client) == [0, 1, 2, 3])
        set_partitions(kombu_client, 12, 4)
        tenant = next(each for each in TENANTS if home_of(each, 12) > 3)
        channel = connection.channel()
        kombu_client.publish("moved", connection=connection, tenant=tenant)
        kombu_client.drain(connection, got, 1)[0].ack()
        channel.close()


def test_a_consumer_of_one_partition_reports_its_end(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    declare(kombu_client, **FOUR)
    pinned = KombuClient(kombu_client.url, "push/3")
    with pinned.connect(**LEASE) as connection, pinned.consuming(connection) as got:
        pinned.drain_until(connection, lambda: consumed(kombu_client) == [3])
        for count in (2, 1):
            set_partitions(kombu_client, count, 4)
            pinned.drain_until(connection, lambda: not consumed(kombu_client))
            (gone,) = events(caplog, "partition_gone")
            assert f"gets no messages of push/3 any more, because queue push has {count} partition" in gone
            assert "Start it with -Q push, which follows" in gone
            assert kombu_client.client.smembers("dq:online:queues") == {b"push"}
            set_partitions(kombu_client, 4, count)
            connection.default_channel.queues("push", refresh=True)  # it asks no partition any more
            pinned.drain_until(connection, partial(is_consumed, kombu_client, [3]))
            tenant = next(each for each in TENANTS if home_of(each, 4) == 3)
            kombu_client.publish("here", tenant=tenant)
            pinned.drain(connection, got, 1)[0].ack()
            got.clear()
            pinned.drain_until(connection, lambda: not pinned_messages(kombu_client))
            caplog.clear()
    pinned.close()


def pinned_messages(kombu_client: KombuClient) -> int:
    return int(kombu_client.client.hlen(PartitionKeys("online", "push", 3).messages))
