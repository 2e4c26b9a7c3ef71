"""Queues with several partitions, where something goes wrong or the number of partitions changes."""

from __future__ import annotations

from typing import Any

import kombu
import pytest
from kombu.exceptions import OperationalError

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store import publisher
from celery_dq.transport.redis.store.move_calls import set_map
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.script_calls import PipelinedConnection
from tests.broker.kombu_client import KombuClient
from tests.broker.test_partitions import AT_HOME, FOUR, batch_of, declare, keys_of, stored


class Interrupt(BaseException):
    """A time limit of a task, or a signal."""


# -- the number of partitions


def test_a_consumed_queue_gets_no_partitions_and_a_new_consumer_asks_for_their_number(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    with kombu_client.connect() as connection:
        with kombu_client.consuming(connection) as got:
            kombu_client.drain_until(connection, lambda: kombu_client.client.exists(kombu_client.keys.leases))
            assert declare(kombu_client, **FOUR) == 1
            kombu_client.publish("at once", tenant=AT_HOME[3])
            kombu_client.drain(connection, got, 1)[0].ack()
            (warning,) = [
                each for each in caplog.records if getattr(each, "event", "") == "partitions_differ"
            ]
            assert "Set the number of the broker in the settings" in warning.getMessage()
        kombu_client.drain_until(connection, lambda: not kombu_client.client.exists(kombu_client.keys.leases))
        assert declare(kombu_client, **FOUR) == 4
        kombu_client.publish("later", tenant=AT_HOME[3])
        with kombu_client.consuming(connection) as got:
            kombu_client.drain(connection, got, 1, 10)[0].ack()
        kombu_client.drain_until(connection, lambda: stored(kombu_client) == [0, 0, 0, 0])


def test_the_name_of_another_queue_is_no_partition(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    other = KombuClient(kombu_client.url, "push/3")
    with other.connect() as connection:
        other.publish("its own", connection=connection)
        assert declare(kombu_client, **FOUR) == 1
        assert "push/3 is the name of another queue" in caplog.text
        with other.consuming(connection) as got:
            other.drain(connection, got, 1)[0].ack()
        connection.default_channel.queue_delete("push/3")
    assert declare(kombu_client, **FOUR) == 4


def test_a_partition_is_subscribed_once_when_the_number_changes(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection, kombu_client.consuming(connection) as first:
        set_map(kombu_client.partition, PartitionMap(), PartitionMap(4)).run(kombu_client.client)
        with kombu_client.consuming(connection) as second:
            claims = connection.default_channel.consumer.claims
            wait_until(lambda: len(claims.subscriptions) == 4)
            assert [each.queue.key for each in claims.subscriptions] == [each.prefix for each in keys_of()]
            kombu_client.publish(*range(8), tenant=AT_HOME[0])
            kombu_client.drain_until(connection, lambda: len(first) + len(second) == 8)
        assert len(first) > 0 < len(second), "they take turns"


# -- publishing


@pytest.mark.parametrize(
    ("tenants", "replicas", "answers_read"),
    [(AT_HOME[:1], 0, 0), (AT_HOME[:3], 0, 1), (AT_HOME[:1], 1, 1)],
    ids=["one", "together", "confirm"],
)
def test_an_interrupted_push_leaves_no_answer_to_the_next(
    kombu_client: KombuClient,
    monkeypatch: pytest.MonkeyPatch,
    tenants: list[str],
    replicas: int,
    answers_read: int,
) -> None:
    monkeypatch.setattr(publisher, "CONFIRM_TIMEOUT_MS", 1)
    with kombu_client.connect(confirm_replicas=replicas, **FOUR) as connection:
        batch = batch_of(kombu_client, connection, tenants)
        later = batch_of(kombu_client, connection, AT_HOME[:1])
        read, left = PipelinedConnection.read, iter([True] * answers_read)

        def interrupted(connection: PipelinedConnection) -> Any:
            if next(left, False):
                return read(connection)
            raise Interrupt

        with monkeypatch.context() as patched:
            patched.setattr(PipelinedConnection, "read", interrupted)
            with pytest.raises(Interrupt):
                batch.flush()
        broken = keys_of()[0].state
        kombu_client.client.delete(broken)
        kombu_client.client.set(broken, "of another program")
        with pytest.raises(OperationalError, match="another program"):
            later.flush()


# -- acknowledging


def test_a_task_id_may_be_in_two_partitions_and_in_two_queues(kombu_client: KombuClient) -> None:
    headers = {"id": "same", "task": "t"}
    declare(kombu_client, **FOUR)
    with kombu_client.connect(**FOUR) as connection:
        for tenant in AT_HOME[1:3]:
            kombu_client.publish(tenant, connection=connection, tenant=tenant, headers=headers)
        KombuClient(kombu_client.url, "mail").publish("mail", connection=connection, headers=headers)
        got: list[Any] = []
        queues = [kombu.Queue("push"), kombu.Queue("mail")]
        with connection.Consumer(queues, on_message=got.append, accept=["json"]):
            kombu_client.drain(connection, got, 3)
            assert len({message.delivery_tag for message in got}) == 3
            for message in got:
                message.ack()
            kombu_client.drain_until(connection, lambda: stored(kombu_client) == [0, 0, 0, 0])
