"""Delayed messages that cannot be read, in a partition that goes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from celery_dq import TenantMoving
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.tenant import NO_TENANT
from tests.integration.partitioned_shop import D, opened

#: A record with a dedup key that is cut short behind its header.
CUT = MessageRecord("t", "notify", 0, 0, 0, b"", b"", dedup=b"key").pack()[:-3]


def _spoil(app: Any, number: int, task_id: str, noise: bytes) -> None:
    with opened(app) as (partitions, client):
        assert client.zscore(partitions[number].keys.delayed, task_id)
        client.hset(partitions[number].keys.messages, task_id, noise)


@pytest.mark.parametrize("noise", [b"noise", b"", b"\x00", b"\xff" * 40, b"A\x08"])
def test_a_delayed_message_that_cannot_be_read_leaves_a_partition_that_goes(
    wide: Any, queue: Any, noise: bytes
) -> None:
    task_id = wide.tasks["notify"].apply_async((D, 9), countdown=3600).id
    _spoil(wide, 3, task_id, noise)
    queue.set_partitions(2, timeout=30)
    with opened(wide) as (partitions, client):
        (home,) = [each for each in partitions if client.hexists(each.keys.messages, task_id)]
        client.zadd(home.keys.delayed, {task_id: 1})
        home.claim("w", lease_ms=60_000, want=1).run(client)
    assert [letter.id for letter in wide.dq.dead_letters["push"].list()] == [task_id]


@pytest.mark.parametrize("noise", [b"noise", CUT], ids=["noise", "cut"])
def test_a_delayed_message_that_cannot_be_read_holds_no_call_without_a_tenant_up(
    wide: Any, queue: Any, noise: bytes
) -> None:
    before = next(n for n in range(5, 200) if PartitionMap(n).home(NO_TENANT) == n - 1)
    queue.set_partitions(before)
    delayed = wide.send_task("report", countdown=7200, queue="push").id
    _spoil(wide, before - 1, delayed, noise)
    with suppress(TenantMoving):
        queue.set_partitions(before - 1, timeout=0.1)
    fresh = wide.send_task("report", queue="push").id
    with suppress(TenantMoving):
        queue.set_partitions(before - 1, timeout=0.1)
    with opened(wide) as (partitions, client):
        home = partitions[PartitionMap(before - 1).home(NO_TENANT)]
        claimed = home.claim("w", lease_ms=60_000, want=9).run(client).entries
    assert [entry.id for entry in claimed] == [fresh]
