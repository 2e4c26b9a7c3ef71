"""A server whose memory is full refuses new messages, and lets go of the ones it has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from celery_dq.inspector.queues import queue_snapshot
from celery_dq.inspector.tenants import tenant_snapshot
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.options.quota import Quota
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition import Partition, PauseReply
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.lua.partition_scripts import make_record


@pytest.fixture
def full_server() -> Iterator[redis.Redis]:
    with RedisServer(config={"maxmemory": "20mb", "maxmemory-policy": "noeviction"}) as server:
        yield redis.Redis(port=server.port)


def test_waiting_messages_can_be_consumed_when_the_memory_is_full(full_server: redis.Redis) -> None:
    partition = Partition(PartitionKeys("online", "full"), load_scripts())
    partition.push([OutgoingRecord(0, str(number), make_record("")) for number in range(10)]).run(full_server)
    full_server.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.ResponseError):
        partition.push([OutgoingRecord(0, "late", make_record(""))]).run(full_server)
    first = partition.claim("c", lease_ms=1000, want=3).run(full_server)
    assert [entry.id for entry in first.entries] == ["0", "1", "2"]
    rest = partition.claim("c", lease_ms=1000, want=9, finish=[e.tag for e in first.entries]).run(full_server)
    tags = [entry.tag for entry in rest.entries]
    assert partition.ack("c", settle=tags[1:], finish=tags[:1]).run(full_server) == 0
    assert partition.ack("c", finish=tags[1:]).run(full_server) == 0
    # Such a server cannot count stale tags.
    assert partition.ack("c", finish=tags).run(full_server) == len(tags)
    full_server.config_set("maxmemory", 0)
    assert full_server.hlen(partition.keys.messages) == 0


def test_an_operator_sees_and_limits_a_queue_when_the_memory_is_full(full_server: redis.Redis) -> None:
    partition = Partition(PartitionKeys("online", "full"), load_scripts())
    partition.push([OutgoingRecord(0, str(number), make_record("t")) for number in range(3)]).run(full_server)
    full_server.config_set("maxmemory", 1)
    partition.set_quota("t", Quota(concurrency=1).pack()).run(full_server)
    partition.set_default_quota(None).run(full_server)
    partition.place_held_back(["t"]).run(full_server)
    # A pause would make the server full for good if no call could end it.
    for tenant in (None, "t"):
        for call in (partition.pause(tenant, for_us=3_600_000_000), partition.resume(tenant)):
            reply = call.run(full_server)
            assert isinstance(reply, PauseReply)
            assert reply.changed
    assert queue_snapshot([partition], full_server).waiting == 3
    assert tenant_snapshot(partition, full_server, "t").state == "eligible"
    assert len(partition.claim("c", lease_ms=1000, want=3).run(full_server).entries) == 1


def test_a_singleton_queue_gets_a_new_leader_when_the_memory_is_full(full_server: redis.Redis) -> None:
    keys = PartitionKeys("online", "full")
    partition = Partition(keys, load_scripts())
    partition.push([OutgoingRecord(0, str(number), make_record("")) for number in range(3)]).run(full_server)
    first, second = (RedisElection(full_server, keys, who, 30) for who in ("first", "second"))
    assert first.become_candidate()
    assert first.accept(0, 0.0).token == 1
    assert partition.fence(1).run(full_server).accepted
    assert [each.id for each in partition.claim("c@1", lease_ms=60_000, want=2).run(full_server).entries] == [
        "0",
        "1",
    ]
    full_server.config_set("maxmemory", 1)
    first.renew()
    assert not second.become_candidate()
    assert len(first.candidates()) == 2
    first.resign(clean=True)
    assert second.become_candidate()
    assert second.accept(0, 0.0) == (2, True, 0)
    assert partition.fence(2).run(full_server).accepted
    assert [each.id for each in partition.claim("d@2", lease_ms=60_000, want=1).run(full_server).entries] == [
        "0"
    ]
    second.resign(clean=True)
    # No worker has led before.
    newcomer = RedisElection(full_server, PartitionKeys("online", "other"), "third", 30)
    assert newcomer.become_candidate()
    assert newcomer.accept(0, 0.0).token == 1
