"""How many partitions a queue has: who decides, and which pushes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.move_calls import set_map
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from tests.lua.partition_scripts import PartitionScripts, make_quota, make_record, tags_of


def declare(scripts: PartitionScripts, count: int, mode: Any = "declare") -> tuple[int, bool]:
    declared = scripts.partition.declare_partitions(PartitionMap(count), mode).run(scripts.client)
    return declared.homes.count, declared.is_new


def push(scripts: PartitionScripts, count: int, *sequences: int, due_us: float = 0) -> list[str]:
    """Push messages as a client does that knows `count` partitions; return the verdicts."""
    partition = Partition(scripts.keys, scripts.partition.scripts, PartitionMap(count))
    messages = [OutgoingRecord(each, f"m{each}", make_record(due_us=int(due_us))) for each in sequences]
    return [each.status for each in partition.push(messages, producer="p").run(scripts.client)]


def test_the_first_client_decides(scripts: PartitionScripts) -> None:
    assert declare(scripts, 1) == (1, False)
    assert scripts.left_over() == set()
    assert declare(scripts, 4) == (4, True)
    assert declare(scripts, 4) == (4, False)
    assert declare(scripts, 8) == (4, False)
    assert declare(scripts, 1) == (4, False)


def test_a_queue_with_messages_keeps_its_number(scripts: PartitionScripts) -> None:
    scripts.push_one("a")
    assert declare(scripts, 4) == (1, False)
    (entry,) = scripts.claim(1).entries
    scripts.settle(*tags_of([entry]))
    assert declare(scripts, 4) == (1, False), "a message that runs counts, also after its early ack"
    scripts.finish(*tags_of([entry]))
    assert declare(scripts, 4, "restore") == (4, True)


def test_a_queue_that_is_consumed_keeps_its_number(scripts: PartitionScripts) -> None:
    scripts.partition.heartbeat("c1", lease_ms=60_000).run(scripts.client)
    assert declare(scripts, 4) == (1, False), "the consumer would not learn of the new partitions"
    scripts.client.zadd(scripts.keys.leases, {"c1": 1})
    assert declare(scripts, 4) == (4, True), "its lease is over"


def test_lost_data_are_restored_although_the_queue_is_consumed(scripts: PartitionScripts) -> None:
    scripts.partition.heartbeat("c1", lease_ms=60_000).run(scripts.client)
    scripts.set_quota("a", 5)
    assert declare(scripts, 4, "restore") == (1, False)
    scripts.partition.set_quota("a", None).run(scripts.client)
    assert declare(scripts, 4, "restore") == (4, True)
    assert declare(scripts, 8, "restore") == (4, False)


def stay(scripts: PartitionScripts, kind: str) -> None:
    """Store something of a kind that has a place by its tenant."""
    client, keys = scripts.client, scripts.keys
    in_an_hour = scripts.now_us() + 3_600_000_000
    if kind in ("tombstones", "limiter"):
        client.zadd(getattr(keys, kind), {"a": in_an_hour, "b": 1})
    elif kind in ("held", "epoch", "paused_until"):
        client.hset(keys.state, kind, in_an_hour)
    else:
        client.hset(getattr(keys, kind), "a", 1)


@pytest.mark.parametrize(
    "kind",
    ["tombstones", "limiter", "dead", "running", "dedup_locks", "messages", "held", "epoch", "paused_until"],
)
def test_a_queue_that_stores_anything_by_tenant_keeps_its_number(
    scripts: PartitionScripts, kind: str
) -> None:
    stay(scripts, kind)
    assert declare(scripts, 4) == (1, False)


@pytest.mark.parametrize("kind", ["tombstones", "limiter"])
def test_a_thing_that_has_expired_keeps_no_number(scripts: PartitionScripts, kind: str) -> None:
    scripts.client.zadd(getattr(scripts.keys, kind), {"a": 1})
    assert declare(scripts, 4) == (4, True)


def test_another_partition_follows_in_any_case(scripts: PartitionScripts) -> None:
    scripts.push_one("a")
    assert declare(scripts, 4, "follow") == (4, True)
    assert declare(scripts, 8, "follow") == (8, True)


def test_a_number_that_is_none_is_refused(scripts: PartitionScripts) -> None:
    with pytest.raises(redis.ResponseError, match="DQINVALID declare_partitions"):
        scripts.partition._call("declare_partitions", ("many", "declare"), bool).run(scripts.client)


@pytest.mark.parametrize("due_us", [0, 8e15], ids=["plain", "delayed"])
def test_a_push_by_another_number_changes_nothing(scripts: PartitionScripts, due_us: float) -> None:
    assert push(scripts, 4, 1, due_us=due_us) == ["misrouted"]
    assert scripts.left_over() == set()
    declare(scripts, 4)
    for wrong in (1, 8):
        assert push(scripts, wrong, 1, due_us=due_us) == ["misrouted"]
        assert push(scripts, wrong, 1, 2, due_us=due_us) == ["misrouted", "misrouted"]
    assert scripts.left_over() == set()
    assert push(scripts, 4, 1, 2, due_us=due_us) == ["accepted", "accepted"]


def test_a_message_that_was_stored_before_is_not_misrouted(scripts: PartitionScripts) -> None:
    assert push(scripts, 1, 1) == ["accepted"]
    (entry,) = scripts.claim(1).entries
    scripts.finish(*tags_of([entry]))
    declare(scripts, 4, "restore")
    assert push(scripts, 1, 1) == ["seen"]
    assert push(scripts, 1, 1, 2) == ["seen", "misrouted"]


def test_a_queue_with_live_quotas_or_pauses_keeps_its_number(scripts: PartitionScripts) -> None:
    scripts.partition.pause("a").run(scripts.client)
    assert declare(scripts, 4) == (1, False)
    scripts.partition.resume("a").run(scripts.client)
    scripts.partition.pause(None).run(scripts.client)
    assert declare(scripts, 4) == (1, False)
    scripts.partition.resume(None).run(scripts.client)
    scripts.set_quota("a", 5)
    assert declare(scripts, 4) == (1, False)
    scripts.partition.set_quota("a", None).run(scripts.client)
    scripts.partition.bring_settings_quota(make_quota(5), by="w", memory_ms=1).run(scripts.client)
    assert declare(scripts, 4) == (4, True), "a worker brings the quota of the settings again"


def test_the_map_is_changed_by_the_client_that_knows_the_stored_one(scripts: PartitionScripts) -> None:
    first = PartitionMap()
    moving = first.begin(4)
    assert str(moving) == "4<1#1"
    assert set_map(scripts.partition, first, moving).run(scripts.client) == moving
    assert set_map(scripts.partition, first, first.begin(8)).run(scripts.client) == moving
    assert push(scripts, 1, 1) == ["misrouted"]
    assert set_map(scripts.partition, moving, moving.end()).run(scripts.client) == PartitionMap(4, None, 2)


def test_an_older_map_does_not_come_back(scripts: PartitionScripts) -> None:
    later = PartitionMap(4).begin(8).end()
    follow = scripts.partition.declare_partitions(later, "follow")
    assert follow.run(scripts.client) == (later, True)
    older = scripts.partition.declare_partitions(PartitionMap(4).begin(8), "follow")
    assert older.run(scripts.client) == (later, False)
