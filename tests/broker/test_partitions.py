"""Queues with several partitions: declaring, routing, consuming."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import kombu
import pytest
from kombu.exceptions import OperationalError

from celery_dq.errors import ConfigurationError, InvalidMessage
from celery_dq.keys import PartitionKeys, queue_registry
from celery_dq.transport.redis.store import quotas as settings_quotas
from celery_dq.transport.redis.store.home import home_of
from celery_dq.transport.redis.store.server_errors import PartitionsChanging
from tests.broker.kombu_client import KombuClient
from tests.broker.proxy import Proxy

FOUR: dict[str, Any] = {"queues": {"push": {"partitions": 4}}}
TENANTS = [f"shop-{number}" for number in range(20)]
#: One tenant for each of the four partitions.
AT_HOME = [
    next(name for name in (f"shop-{each}" for each in range(100)) if home_of(name, 4) == number)
    for number in range(4)
]
RETRY = {"max_retries": 5, "interval_start": 0, "interval_step": 0.01, "interval_max": 0.05}


@pytest.fixture
def learned(kombu_client: KombuClient, proxy: Proxy) -> Iterator[Any]:
    """A connection of a client that has learned that the queue has one partition; now it has four."""
    with kombu_client.connect(proxy.url(kombu_client.url)) as connection:
        kombu_client.publish("before", connection=connection)
        connection.default_channel.queue_purge("push")
        declare(kombu_client, **FOUR)
        yield connection


def declare(kombu_client: KombuClient, **options: Any) -> int:
    with kombu_client.connect(**options) as connection:
        channel: Any = connection.default_channel
        kombu.Queue("push")(channel).declare()
        return int(channel.queues("push").count)


def keys_of(partitions: int = 4) -> list[PartitionKeys]:
    return [PartitionKeys("online", "push", number) for number in range(partitions)]


def stored(kombu_client: KombuClient, partitions: int = 4) -> list[int]:
    """How many messages each partition holds."""
    return [kombu_client.client.hlen(each.messages) for each in keys_of(partitions)]


def homes(tenants: Sequence[str] = TENANTS, partitions: int = 4) -> list[int]:
    """How many messages each partition must hold when each tenant has one."""
    counts = Counter(home_of(tenant, partitions) for tenant in tenants)
    return [counts[number] for number in range(partitions)]


def publish_one_each(kombu_client: KombuClient, connection: Any) -> None:
    for tenant in TENANTS:
        kombu_client.publish(tenant, connection=connection, tenant=tenant, retry=True, retry_policy=RETRY)


def batch_of(kombu_client: KombuClient, connection: Any, tenants: Sequence[str] = TENANTS) -> Any:
    """A batch with a message of each tenant, which is not yet sent."""
    channel: Any = connection.default_channel
    kombu.Queue("push")(channel).declare()
    batch = channel.create_publish_batch(1000)
    for tenant in tenants:
        properties = {"tenant": tenant}
        message = channel.prepare_message(f'"{tenant}"', 0, "application/json", "utf-8", {}, properties)
        batch.publish(message, exchange="", routing_key="push")
    return batch


class OneSingletonQueue(NamedTuple):
    """The part of a worker's leaderships that says which queues are singleton queues."""

    singleton: str

    def is_singleton(self, name: str) -> bool:
        return name == self.singleton


# -- declaring


def test_each_tenant_lives_in_one_partition_and_all_are_consumed(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**FOUR) as connection:
        publish_one_each(kombu_client, connection)
        assert stored(kombu_client) == homes()
        assert min(stored(kombu_client)) > 0
        assert connection.default_channel.queue_declare("push", passive=True).message_count == len(TENANTS)
    # A consumer without the setting learns the number from the broker.
    with kombu_client.connect() as connection, kombu_client.consuming(connection) as got:
        kombu_client.drain(connection, got, len(TENANTS))
        assert sorted(message.payload for message in got) == sorted(TENANTS)
        assert {message.delivery_info["routing_key"] for message in got} == {"push"}
        for message in got:
            message.ack()
    assert stored(kombu_client) == [0, 0, 0, 0]


@pytest.mark.parametrize("attempt", range(3))
def test_clients_that_want_different_numbers_at_once_agree(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture, attempt: int
) -> None:
    start, counts = threading.Barrier(2), []

    def publish(partitions: int) -> None:
        options: dict[str, Any] = {"queues": {"push": {"partitions": partitions}}}
        with kombu_client.connect(**options) as connection:
            channel: Any = connection.default_channel
            start.wait(30)
            publish_one_each(kombu_client, connection)
            counts.append(channel.queues("push").count)

    threads = [threading.Thread(target=publish, args=(number,)) for number in (4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts in ([4, 4], [8, 8])
    assert stored(kombu_client, 8) == homes(TENANTS * 2, counts[0]) + [0] * (8 - counts[0])
    (warning,) = [each for each in caplog.records if getattr(each, "event", "") == "partitions_differ"]
    assert f"the broker has {counts[0]} partitions" in warning.getMessage()
    assert f"--set {12 - counts[0]}" in warning.getMessage()


def test_a_queue_with_messages_keeps_its_number(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture
) -> None:
    kombu_client.publish("old")
    with kombu_client.connect(**FOUR) as connection:
        publish_one_each(kombu_client, connection)
        assert stored(kombu_client) == [21, 0, 0, 0]
        with kombu_client.consuming(connection) as got:
            kombu_client.drain(connection, got, 21)
    (warning,) = [each for each in caplog.records if getattr(each, "event", "") == "partitions_differ"]
    assert warning.getMessage().startswith("dq_queues['push']['partitions'] is 4, but the broker has 1 ")


def test_a_singleton_queue_has_one_partition(kombu_client: KombuClient) -> None:
    declare(kombu_client, **FOUR)
    with kombu_client.connect() as connection:
        channel: Any = connection.default_channel
        connection.transport_options["dq"].leaderships = OneSingletonQueue("push")
        with pytest.raises(ConfigurationError, match="'push' is a singleton queue and has 4 partitions"):
            channel.basic_consume("push", False, print, "tag")


@pytest.mark.parametrize("options", [FOUR, {}], ids=["the settings", "the broker"])
def test_lost_data_are_declared_again_as_the_process_knows_them(
    kombu_client: KombuClient, options: dict[str, Any]
) -> None:
    declare(kombu_client, **FOUR)
    with kombu_client.connect(**options) as connection:
        publish_one_each(kombu_client, connection)
        kombu_client.client.flushdb()
        # A consumer was faster: with a living lease, a new client would declare nothing.
        kombu_client.client.zadd(keys_of()[0].leases, {"consumer": 1e16})
        publish_one_each(kombu_client, connection)
    assert stored(kombu_client) == homes()


def test_an_interrupted_declaration_is_repaired(kombu_client: KombuClient) -> None:
    kombu_client.client.hset(keys_of()[0].state, "partitions", 4)
    kombu_client.client.hset(keys_of()[2].state, "partitions", 7)
    kombu_client.publish(*range(3), tenant=TENANTS[0])
    with kombu_client.connect() as connection:
        publish_one_each(kombu_client, connection)
    assert {kombu_client.client.hget(each.state, "partitions") for each in keys_of()} == {b"4"}
    assert sum(stored(kombu_client)) == 23


# -- routing


@pytest.mark.parametrize("batched", [False, True])
def test_a_refused_push_is_sent_to_the_homes(kombu_client: KombuClient, learned: Any, batched: bool) -> None:
    if batched:
        batch_of(kombu_client, learned).flush()
    else:
        publish_one_each(kombu_client, learned)
    assert stored(kombu_client) == homes()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("lost", ["refusal", "push"])
def test_a_lost_answer_stores_no_second_copy(
    kombu_client: KombuClient, learned: Any, proxy: Proxy, batched: bool, lost: str
) -> None:
    batch = batch_of(kombu_client, learned) if batched else None
    proxy.drop_answers_to = TENANTS[0].encode() if lost == "refusal" else b".4\r\n"
    proxy.drops_left = 2
    if batch is not None:
        batch.flush()
    else:
        publish_one_each(kombu_client, learned)
    assert proxy.dropped == 2
    assert stored(kombu_client) == homes()


def test_a_batch_keeps_the_order_of_each_tenant_and_survives_a_lost_script_cache(
    kombu_client: KombuClient,
) -> None:
    with kombu_client.connect(**FOUR) as connection:
        batch = batch_of(kombu_client, connection)
        kombu_client.client.script_flush()
        batch.flush()
        batch_of(kombu_client, connection).flush()
        assert stored(kombu_client) == homes(TENANTS * 2)
        with kombu_client.consuming(connection) as got:
            kombu_client.drain(connection, got, 40)
        assert Counter(message.payload for message in got) == Counter(TENANTS * 2)


def test_a_partition_that_refuses_fails_the_batch_and_the_rest_is_stored_once(
    kombu_client: KombuClient,
) -> None:
    with kombu_client.connect(**FOUR) as connection:
        batch = batch_of(kombu_client, connection)
        broken = keys_of()[1].state
        kombu_client.client.rename(broken, "aside")
        kombu_client.client.set(broken, "of another program")
        with pytest.raises(OperationalError, match="another program"):
            batch.flush()
        assert [count > 0 for count in stored(kombu_client)] == [True, False, True, True]
        kombu_client.client.rename("aside", broken)
        batch.flush()
        assert stored(kombu_client) == homes()


def test_a_message_that_is_routed_again_is_no_duplicate_of_a_later_one(kombu_client: KombuClient) -> None:
    """An operator takes partitions away; the first and the seventh one know it, the others not yet."""
    names = [f"shop-{number}" for number in range(200)]
    moved = next(name for name in names if (home_of(name, 4), home_of(name, 8)) == (1, 6))
    stays = next(name for name in names if home_of(name, 8) == 1)
    with kombu_client.connect(queues={"push": {"partitions": 8}}) as connection:
        batch = batch_of(kombu_client, connection, [moved, stays])
        for number in (0, 6):
            kombu_client.client.hset(keys_of(8)[number].state, "partitions", 4)
        batch.flush()
    assert stored(kombu_client, 8) == [0, 2, 0, 0, 0, 0, 0, 0]


def test_a_number_that_changes_all_the_time_is_an_error(
    kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = next(name for name in TENANTS if home_of(name, 4))  # the first partition keeps the number
    with kombu_client.connect(**FOUR) as connection:
        publish_one_each(kombu_client, connection)
        channel: Any = connection.default_channel
        queues = channel.publisher._queues

        def changed(name: str, refresh: bool) -> Any:
            found = queues(name, refresh)
            kombu_client.client.hset(found.home(elsewhere).partition.keys.state, "partitions", 5)
            return found

        channel.publisher._queues = changed
        with pytest.raises(PartitionsChanging, match=r"queue 'push' .* 1 messages, of which none is stored"):
            kombu_client.publish("lost", connection=connection, tenant=elsewhere)


def test_closing_shortens_the_markers_of_all_partitions(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**FOUR) as connection:
        batch_of(kombu_client, connection).flush()
    markers = list(kombu_client.client.scan_iter("dq:{online/push/*}:producer:*"))
    assert len(markers) == 4
    assert all(kombu_client.client.pttl(marker) <= 60_000 for marker in markers)


# -- consuming


def test_purge_and_delete_empty_all_partitions(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**FOUR) as connection:
        channel: Any = connection.default_channel
        for empty in (channel.queue_purge, channel.queue_delete):
            publish_one_each(kombu_client, connection)
            assert empty("push") in (20, None)
            assert stored(kombu_client) == [0, 0, 0, 0]
        assert kombu_client.client.smembers(queue_registry("online")) == set()


def test_basic_get_finds_each_message(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**FOUR) as connection:
        publish_one_each(kombu_client, connection)
        channel: Any = connection.default_channel
        got = [channel.basic_get("push", no_ack=True) for _ in range(21)]
        assert got.pop() is None
        assert sorted(message.payload for message in got) == sorted(TENANTS)
    assert stored(kombu_client) == [0, 0, 0, 0]


def test_a_cancelled_consumer_gives_back_its_messages(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**FOUR) as connection:
        publish_one_each(kombu_client, connection)
        with kombu_client.consuming(connection, prefetch=1) as got:
            kombu_client.drain(connection, got, 1)
        assert connection.default_channel.queue_declare("push", passive=True).message_count == 19
        got[0].ack()
        with kombu_client.consuming(connection, prefetch=100) as rest:
            kombu_client.drain(connection, rest, 19)
    assert Counter(message.payload for message in got + rest) == Counter(TENANTS)


def test_the_quota_of_the_settings_reaches_every_partition(kombu_client: KombuClient) -> None:
    quota: dict[str, Any] = {"queues": {"push": {"partitions": 4, "rate": "5/s"}}}
    with kombu_client.connect(**quota) as connection, kombu_client.consuming(connection):
        quotas = [kombu_client.client.hgetall(each.quotas) for each in keys_of()]
    assert quotas[0].keys() == {b"config"}
    assert quotas == [quotas[0]] * 4


# -- a client that knows the number of before


@pytest.fixture
def scattered(kombu_client: KombuClient, learned: Any) -> Any:
    """A channel of the client that knows one partition; each of the four has a message."""
    for tenant in AT_HOME:
        kombu_client.publish(tenant, tenant=tenant)
    assert stored(kombu_client) == [1, 1, 1, 1]
    return learned.default_channel


@pytest.mark.parametrize("empty", ["queue_purge", "queue_delete"])
def test_purge_and_delete_empty_partitions_that_were_added(
    kombu_client: KombuClient, scattered: Any, empty: str
) -> None:
    assert getattr(scattered, empty)("push") in (4, None)
    assert stored(kombu_client) == [0, 0, 0, 0]


def test_a_queue_with_a_message_in_a_partition_that_was_added_is_not_deleted_as_an_empty_one(
    kombu_client: KombuClient, learned: Any
) -> None:
    kombu_client.publish("kept", tenant=AT_HOME[3])
    learned.default_channel.queue_delete("push", if_empty=True)
    assert stored(kombu_client) == [0, 0, 0, 1]
    assert kombu_client.client.smembers(queue_registry("online")) == {b"push"}


@pytest.mark.parametrize("passive", [True, False])
def test_messages_in_partitions_that_were_added_count(scattered: Any, passive: bool) -> None:
    assert scattered.queue_declare("push", passive=passive).message_count == 4


def test_basic_get_finds_messages_in_partitions_that_were_added(
    kombu_client: KombuClient, scattered: Any
) -> None:
    got = [scattered.basic_get("push", no_ack=True) for _ in range(5)]
    assert got.pop() is None
    assert sorted(message.payload for message in got) == sorted(AT_HOME)
    assert stored(kombu_client) == [0, 0, 0, 0]


def test_basic_get_from_a_partition_of_an_unfinished_change_finds_nothing(kombu_client: KombuClient) -> None:
    declare(kombu_client, **FOUR)
    kombu_client.client.hset(keys_of()[3].state, "partitions", "7<4#1")
    with KombuClient(kombu_client.url, "push/3").connect() as connection:
        assert connection.default_channel.basic_get("push/3") is None


# -- one partition


def test_a_number_that_changes_at_each_attempt_to_consume_is_an_error(
    kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_settings, attempts = settings_quotas.apply_settings, 0

    def changed(*args: Any, **kwargs: Any) -> Any:
        nonlocal attempts
        attempts += 1
        assert attempts < 50, "the consumer tries without an end"
        kombu_client.client.hset(keys_of()[1].state, "partitions", 5)
        return apply_settings(*args, **kwargs)

    monkeypatch.setattr(settings_quotas, "apply_settings", changed)
    with kombu_client.connect(queues={"push": {"partitions": 4, "rate": 5}}) as connection:
        with pytest.raises(PartitionsChanging, match="queue 'push' .* attempts to consume it"):
            connection.default_channel.basic_consume("push", False, lambda message: None, "1")
        monkeypatch.undo()
        connection.default_channel.basic_consume("push", False, lambda message: None, "1")
    assert [kombu_client.client.hget(each.state, "partitions") for each in keys_of()] == [b"4"] * 4


def test_one_partition_is_consumed_alone(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**FOUR) as connection:
        publish_one_each(kombu_client, connection)
    pinned = KombuClient(kombu_client.url, "push/3")
    with pinned.connect() as connection:
        here = [tenant for tenant in TENANTS if home_of(tenant, 4) == 3]
        assert connection.default_channel.queue_declare("push/3").message_count == len(here)
        assert connection.default_channel.queue_declare("push/3", passive=True).message_count == len(here)
        with pinned.consuming(connection) as got:
            pinned.drain(connection, got, len(here), 10)
            assert sorted(message.payload for message in got) == sorted(here)
            assert {message.delivery_info["routing_key"] for message in got} == {"push"}
            for message in got:
                message.ack()
    pinned.close()
    assert stored(kombu_client) == [*homes()[:3], 0]
    assert kombu_client.client.smembers(queue_registry("online")) == {b"push"}


def test_two_consumers_of_one_partition_take_turns(kombu_client: KombuClient) -> None:
    tenants = [f"shop-{number}" for number in range(100)]
    with kombu_client.connect(**FOUR) as connection:
        for tenant in tenants:
            kombu_client.publish(tenant, connection=connection, tenant=tenant)
        got: dict[str, list[Any]] = {"push": [], "push/3": []}
        consumers = [
            connection.Consumer([kombu.Queue(name)], on_message=got[name].append, accept=["json"])
            for name in got
        ]
        with consumers[0], consumers[1]:
            kombu_client.drain_until(connection, lambda: sum(map(len, got.values())) == len(tenants))
    assert {home_of(message.payload, 4) for message in got["push/3"]} == {3}
    assert {home_of(message.payload, 4) for message in got["push"]} == {0, 1, 2, 3}


def test_no_message_is_sent_to_one_partition(kombu_client: KombuClient) -> None:
    declare(kombu_client, **FOUR)
    pinned = KombuClient(kombu_client.url, "push/3")
    with pytest.raises(InvalidMessage, match="tenant of a message decides its partition: send it to 'push'"):
        pinned.publish("a")
    pinned.close()


def test_a_partition_has_no_partitions(kombu_client: KombuClient) -> None:
    declare(kombu_client, **FOUR)
    text = "queue = 'push/3/1', but 'push/3' is one partition of queue 'push' and has no partitions"
    with kombu_client.connect() as connection, pytest.raises(ConfigurationError, match=text):
        connection.default_channel.queue_declare("push/3/1")


@pytest.mark.parametrize(
    "name", ["push/4", "push/70", "push/1" + 9 * "0", pytest.param("push/1" + 5000 * "0", id="long")]
)
def test_a_partition_that_does_not_exist_is_an_error(kombu_client: KombuClient, name: str) -> None:
    declare(kombu_client, **FOUR)
    text = rf"{name[:60]}.* has 4 partitions: name one from push/0 to push/3"
    with kombu_client.connect() as connection, pytest.raises(ConfigurationError, match=text):
        connection.default_channel.queue_declare(name)


@pytest.mark.parametrize("name", ["push/0", "push/3", "push/03", "a/b/3", "/3"])
def test_a_slash_in_a_name_is_allowed_where_no_queue_has_partitions(
    kombu_client: KombuClient, name: str
) -> None:
    other = KombuClient(kombu_client.url, name)
    with other.connect() as connection:
        other.publish("a", connection=connection)
        assert other.depth() == 1
        with other.consuming(connection) as got:
            other.drain(connection, got, 1)
    assert other.client.smembers(queue_registry("online")) == {name.encode()}
    other.close()
