"""Consumers of many queues: they begin together, in few round trips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kombu
import pytest

from celery_dq.errors import ConfigurationError
from celery_dq.keys import PartitionKeys, queue_registry
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts, run_all
from tests.broker.kombu_client import KombuClient
from tests.broker.test_partitions import OneSingletonQueue
from tests.brokers import BROKERS
from tests.workers import WorkerProcess

NAMES = [f"q{number}" for number in range(100)]


def reads(kombu_client: KombuClient) -> int:
    """How often the server has read from its clients."""
    return int(kombu_client.client.info("stats")["total_reads_processed"])


def count(connection: Any, queue: kombu.Queue) -> int:
    """Declare a queue; return its number of messages."""
    declared: Any = queue(connection.default_channel).queue_declare()
    return int(declared.message_count)


def publish_each(kombu_client: KombuClient, connection: Any, names: list[str]) -> None:
    producer = connection.Producer()
    for name in names:
        producer.publish(name, routing_key=name, declare=[kombu.Queue(name)], serializer="json")


def publish_elsewhere(kombu_client: KombuClient, *names: str) -> None:
    with kombu_client.connect() as connection:
        publish_each(kombu_client, connection, list(names))


@pytest.mark.parametrize("quota", [None, "5/s"])
def test_many_consumers_begin_in_few_round_trips(kombu_client: KombuClient, quota: str | None) -> None:
    options: dict[str, Any] = {"default_quota": {"rate": quota}} if quota else {}
    with kombu_client.connect(**options) as connection:
        got: list[Any] = []
        consumer = connection.Consumer([kombu.Queue(name) for name in NAMES], on_message=got.append)
        before = reads(kombu_client)
        consumer.consume()
        assert reads(kombu_client) - before < len(NAMES)
        publish_each(kombu_client, connection, NAMES)
        kombu_client.drain_until(connection, lambda: len(got) == len(NAMES))
        stored = [kombu_client.client.keys(f"*{name}*quotas*") for name in NAMES]
        assert all(stored) if quota else not any(stored)


def evaluations(client: Any, run: Callable[[], object]) -> int:
    """Return how many scripts a server without scripts receives as text during a call."""
    client.script_flush()
    client.config_resetstat()
    run()
    return int(client.info("commandstats")["cmdstat_eval"]["calls"])


@pytest.fixture
def alone() -> Iterator[KombuClient]:
    """A queue on a server of its own: no heartbeat of an earlier test calls there."""
    with RedisServer() as server:
        client = KombuClient(server.url())
        yield client
        client.close()


def test_a_script_that_the_server_lacks_is_sent_to_it_once(alone: KombuClient) -> None:
    partitions = [Partition(PartitionKeys("online", name), load_scripts()) for name in NAMES]
    calls = [each.heartbeat("consumer", lease_ms=1000) for each in partitions]
    assert evaluations(alone.client, lambda: run_all(calls, alone.client)) == 1
    with alone.connect(default_quota={"rate": "5/s"}) as connection:
        consumer = connection.Consumer([kombu.Queue(name) for name in NAMES])
        # The thread of the heartbeat may begin, with its script.
        assert evaluations(alone.client, consumer.consume) <= 2


def test_the_queues_of_a_worker_are_declared_in_few_round_trips(kombu_client: KombuClient) -> None:
    client = kombu_client.client
    keys = ("_kombu.binding.q1", "_kombu.binding_permanent.q1", queue_registry("online"))
    options: dict[str, Any] = {"queues": {"q3": {"partitions": 4}}}
    queues = [kombu.Queue(name, kombu.Exchange(name), name) for name in NAMES]
    with kombu_client.connect(**options) as connection:
        for queue in queues:
            queue(connection.default_channel).declare()
        alone = [client.smembers(key) for key in keys]
    client.flushall()
    with kombu_client.connect(**options) as connection:
        connection.transport_options["dq"].consumed_queues = lambda other: (
            queues if other is connection else ()
        )
        before = reads(kombu_client)
        consumer = connection.Consumer(queues[1:])
        assert reads(kombu_client) - before < len(NAMES)
        assert [client.smembers(key) for key in keys] == alone
        assert client.hget(PartitionKeys("online", "q3", 3).state, "partitions") == b"4"
        # Each answer is used once, and none after the consumers have begun.
        publish_elsewhere(kombu_client, "q0")
        consumer.consume()
        client.delete(*keys)
        assert [count(connection, queue) for queue in queues] == [int(name == "q0") for name in NAMES]
        assert client.smembers(keys[-1]) == alone[-1]


def test_a_message_count_ahead_is_that_of_the_queue(kombu_client: KombuClient) -> None:
    publish_elsewhere(kombu_client, "q1", "q1")
    queues = [kombu.Queue(name, kombu.Exchange(name), name) for name in ("q0", "q1")]
    with kombu_client.connect() as connection:
        connection.transport_options["dq"].consumed_queues = lambda _: queues
        channel = connection.default_channel
        assert count(connection, queues[0]) == 0
        publish_elsewhere(kombu_client, "q1")
        assert channel.queue_declare("q1", passive=True).message_count == 3


def test_a_message_count_ahead_ends_with_a_purge(kombu_client: KombuClient) -> None:
    publish_elsewhere(kombu_client, "q1", "q1")
    queues = [kombu.Queue(name, kombu.Exchange(name), name) for name in ("q0", "q1")]
    with kombu_client.connect() as connection:
        connection.transport_options["dq"].consumed_queues = lambda _: queues
        assert count(connection, queues[0]) == 0
        assert connection.default_channel.queue_purge("q1") == 2
        assert count(connection, queues[1]) == 0


def test_a_queue_that_was_deleted_after_it_was_declared_ahead_is_declared_again(
    kombu_client: KombuClient,
) -> None:
    queues = [kombu.Queue(name, kombu.Exchange(name), name) for name in ("q0", "q1")]
    with kombu_client.connect() as connection:
        connection.transport_options["dq"].consumed_queues = lambda _: queues
        channel = connection.default_channel
        queues[0](channel).declare()
        publish_elsewhere(kombu_client, "q1")
        channel.queue_delete("q1", if_empty=True)
        assert channel.queue_declare("q1", passive=True).message_count == 1
        channel.queue_delete("q1")
        queues[1](channel).declare()
        assert kombu_client.client.smembers(queue_registry("online")) == {b"q0", b"q1"}


def test_an_error_of_a_queue_stays_with_its_declaration(kombu_client: KombuClient) -> None:
    kombu_client.client.hset(PartitionKeys("online", "q1").state, "partitions", 4)
    queues = [kombu.Queue(name, kombu.Exchange(name), name) for name in ("q0", "q1", "q2")]
    with kombu_client.connect() as connection:
        context = connection.transport_options["dq"]
        context.consumed_queues, context.leaderships = lambda _: queues, OneSingletonQueue("q1")
        channel = connection.default_channel
        queues[0](channel).declare()
        with pytest.raises(ConfigurationError, match="'q1' is a singleton queue and has 4 partitions"):
            queues[1](channel).declare()
        queues[2](channel).declare()
        members = kombu_client.client.smembers(queue_registry("online"))
        assert members == {b"q0", b"q2"}
        assert kombu_client.client.exists("_kombu.binding.q0", "_kombu.binding.q2") == 2


def test_a_consumer_claims_nothing_from_queues_that_were_empty(kombu_client: KombuClient) -> None:
    """A claim from each of many empty queues would be a round trip before the next one from q7."""
    publish_elsewhere(kombu_client, "q7")
    queues = [kombu.Queue(name, kombu.Exchange(name), name) for name in NAMES]
    with kombu_client.connect(lease=3600) as connection:
        connection.transport_options["dq"].consumed_queues = lambda _: queues
        got: list[Any] = []
        connection.Consumer(queues, on_message=got.append).consume()
        claimed_from = connection.default_channel.identity.claim_times
        kombu_client.drain_until(connection, lambda: got)
        # The first heartbeat does not wait for its time, a quarter of a lease from now.
        leases = [PartitionKeys("online", name).leases for name in NAMES]
        kombu_client.drain_until(connection, lambda: kombu_client.client.exists(*leases) == len(NAMES))
        assert set(claimed_from) == {"q7"}
        publish_elsewhere(kombu_client, "q9")
        kombu_client.drain_until(connection, lambda: len(got) == 2)
        assert set(claimed_from) == {"q7", "q9"}


def test_a_worker_declares_its_queues_together(kombu_client: KombuClient) -> None:
    conf = {"broker_url": kombu_client.broker_url, "dq_default_quota": {"rate": "5/s"}}
    before = reads(kombu_client)
    with WorkerProcess(
        "tests.migration.worker_app", broker=BROKERS["dq"], conf=conf, pool="solo", queues=NAMES
    ):
        assert reads(kombu_client) - before < 2 * len(NAMES)
    assert kombu_client.client.scard(queue_registry("online")) == len(NAMES)
    assert kombu_client.client.scard("_kombu.binding.q99") == 1


def test_a_consumer_without_an_answer_begins_with_the_next_turn(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection:
        got: list[Any] = []
        connection.default_channel.basic_consume("push", True, got.append, "1", nowait=True)
        publish_each(kombu_client, connection, ["push"])
        kombu_client.drain_until(connection, lambda: got)


def test_a_consumer_that_is_cancelled_before_it_began_never_begins(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection:
        got: list[Any] = []
        channel = connection.default_channel
        channel.basic_consume("never", True, got.append, "1", nowait=True)
        channel.basic_cancel("1")
        channel.basic_consume("push", True, got.append, "2")
        publish_each(kombu_client, connection, ["never", "push"])
        kombu_client.drain_until(connection, lambda: got)
        assert [message.delivery_info["routing_key"] for message in got] == ["push"]
        assert [queue.name for queue in channel.identity.threads.queues.values()] == ["push"]


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
        kombu_client.drain_until(connection, lambda: len(got) == 2)
