"""The scripts and keys of the broker on a cluster: places of partitions, wake-ups, moving slots."""

from __future__ import annotations

from typing import Any

import kombu
import pytest
import redis
from kombu import Connection

from celery_dq.context import AppContext
from celery_dq.hash_slots import SLOTS
from celery_dq.keys import PartitionKeys
from celery_dq.options.resolve import resolve
from celery_dq.testing.redis_cluster import ClusterNode, RedisCluster
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.cluster_client import ClusterClient, cluster_pool, slots_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts, run_all

RECORD = MessageRecord(
    tenant="t", task="shop.send", priority=0, due_us=0, expires_us=0, envelope=b"{}", body=b"[]", dedup=b""
).pack()


def push(partition: Partition, client: ClusterClient, number: int) -> None:
    (reply,) = partition.push([OutgoingRecord(number, f"task-{number}", RECORD)], producer="p").run(client)
    assert reply.status == "accepted"


@pytest.mark.parametrize("nodes", [3, 5, 6])
def test_partitions_are_spread_evenly_over_the_nodes(nodes: int) -> None:
    for name in ("push", "mail", "shop/with ~ signs"):
        counts = [0] * nodes
        for number in range(64):
            counts[PartitionKeys("online", name, number, on_cluster=True).slot * nodes // SLOTS] += 1
        assert max(counts) <= 64 / nodes * 1.25


def test_a_key_on_a_cluster_names_its_partition() -> None:
    keys = PartitionKeys("online", "shop/a", 12, "my:", on_cluster=True)
    assert PartitionKeys.parse(keys.wake) == keys
    assert keys.prefix.startswith("my:dq:{online/shop%2Fa/12.")
    assert PartitionKeys.parse(PartitionKeys("online", "q", 3).state) == PartitionKeys("online", "q", 3)


def test_a_wake_up_is_announced_and_announced_again_by_heartbeats(
    client: ClusterClient, redis_cluster: RedisCluster, partition: Partition
) -> None:
    node = redis_cluster.master_of(partition.keys.slot)
    with redis.Redis(port=node.port, protocol=3) as direct, direct.pubsub() as subscriber:
        subscriber.ssubscribe(partition.keys.woken)
        assert subscriber.get_sharded_message(timeout=30)["type"] == "ssubscribe"
        push(partition, client, 1)
        assert subscriber.get_message(timeout=5)["data"] == b"0"
        push(partition, client, 2)  # the wake-up is stored already
        partition.heartbeat("w1", lease_ms=60_000).run(client)
        assert subscriber.get_message(timeout=5)["data"] == b"1"
        assert client.lpop(partition.keys.wake) == b"1"
        partition.claim("w1", lease_ms=60_000, want=2).run(client)
        partition.heartbeat("w1", lease_ms=60_000).run(client)
        assert subscriber.get_message(timeout=0.1) is None


@pytest.fixture
def partitions(queue_name: str, redis_cluster: RedisCluster) -> list[Partition]:
    """The partitions of a queue, on all masters."""
    keys = [PartitionKeys("online", queue_name, number, on_cluster=True) for number in range(12)]
    assert len({redis_cluster.master_of(each.slot).port for each in keys}) == 3
    return [Partition(each, load_scripts(on_cluster=True)) for each in keys]


def test_heartbeats_bring_their_script_to_all_nodes(
    client: ClusterClient, partitions: list[Partition]
) -> None:
    client.script_flush()
    replies = run_all([each.heartbeat("w1", lease_ms=60_000) for each in partitions], client)
    assert len(replies) == len(partitions)


def test_a_batch_brings_its_script_to_all_nodes(
    client: ClusterClient, connection: Connection, queue_name: str
) -> None:
    context = AppContext("dq", lambda: resolve({"dq_queues": {queue_name: {"partitions": 12}}}))
    options = {"dq": context}
    with kombu.Connection(connection.as_uri(include_password=True), transport_options=options) as own:
        channel: Any = own.default_channel
        producer: Any = own.Producer()
        kombu.Queue(queue_name)(channel).declare()
        client.script_flush()
        with producer.batch():
            for number in range(60):
                producer.publish("task", routing_key=queue_name, serializer="json", tenant=f"t{number}")
        assert channel.queue_declare(queue_name, passive=True).message_count == 60


@pytest.mark.parametrize("moved", ["no key", "some keys", "all keys"])
def test_no_script_runs_where_keys_of_its_slot_are_missing(
    client: ClusterClient, redis_cluster: RedisCluster, partition: Partition, moved: str
) -> None:
    push(partition, client, 1)
    slot = partition.keys.slot
    source = redis_cluster.master_of(slot)
    target = next(each for each in redis_cluster.masters() if each is not source)
    redis_cluster.begin_move(slot, target)
    most = {"no key": 0, "some keys": 3, "all keys": 100}[moved]
    assert redis_cluster.move_keys(slot, source, target, most=most) >= min(most, 4)
    before = _keys_in(slot, source, target)
    hasty = ClusterClient(
        connection_pool=cluster_pool(slots_of(client.connection_pool), redis.Connection, socket_timeout=0.2)
    )
    with pytest.raises((redis.exceptions.TryAgainError, redis.exceptions.AskError)):
        push(partition, hasty, 2)
    with pytest.raises((redis.exceptions.TryAgainError, redis.exceptions.AskError)):
        partition.claim("w1", lease_ms=60_000, want=5).run(hasty)
    assert _keys_in(slot, source, target) == before
    redis_cluster.move_keys(slot, source, target)
    redis_cluster.end_move(slot, target)
    push(partition, client, 2)
    claimed = partition.claim("w1", lease_ms=60_000, want=5).run(client)
    assert [entry.id for entry in claimed.entries] == ["task-1", "task-2"]


def _keys_in(slot: int, *nodes: ClusterNode) -> list[str]:
    return [str(node.ask("CLUSTER", "GETKEYSINSLOT", slot, 100)) for node in nodes]
