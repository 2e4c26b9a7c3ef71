"""The heartbeat deletes dead letters that are too old, or too many."""

from __future__ import annotations

import pytest

from celery_dq.keys import PartitionKeys
from tests.lua.partition_scripts import LEASE_MS, PartitionScripts

MINUTE_MS = 60_000


@pytest.fixture
def six(scripts: PartitionScripts) -> PartitionScripts:
    """A partition with the dead letters 0 to 5, which are 0 to 5 minutes old."""
    for place in range(6):
        scripts.push(str(place))
        (entry,) = scripts.claim().entries
        scripts.partition.dead_letter("c1", entry.tag, reason="r", worker="w").run(scripts.client)
        now = scripts.now_us()
        scripts.client.zadd(scripts.keys.dead_index, {str(place): now - place * MINUTE_MS * 1000})
    return scripts


def left(scripts: PartitionScripts) -> list[str]:
    keys: PartitionKeys = scripts.keys
    ids = sorted(each.decode() for each in scripts.client.hkeys(keys.dead))
    assert sorted(each.decode() for each in scripts.client.hkeys(keys.dead_info)) == ids
    assert sorted(each.decode() for each in scripts.client.zrange(keys.dead_index, 0, -1)) == ids
    return ids


def beat(scripts: PartitionScripts, retention: tuple[int, int], limit: int = 100) -> list[str]:
    call = scripts.partition.heartbeat("c1", lease_ms=LEASE_MS, limit=limit, retention=retention)
    call.run(scripts.client)
    return left(scripts)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        ((0, 0), "012345"),
        ((int(2.5 * MINUTE_MS), 0), "012"),
        ((0, 4), "0123"),
        ((0, 9), "012345"),
        ((int(2.5 * MINUTE_MS), 1), "0"),
        ((int(2.5 * MINUTE_MS), 5), "012"),
    ],
)
def test_by_age_and_by_number(six: PartitionScripts, retention: tuple[int, int], kept: str) -> None:
    assert beat(six, retention) == [*kept]


@pytest.mark.parametrize("retention", [(1, 0), (0, 1)])
def test_in_chunks_the_oldest_first(six: PartitionScripts, retention: tuple[int, int]) -> None:
    assert beat(six, retention, limit=0) == [*"012345"]
    assert beat(six, retention, limit=2) == [*"0123"]
    assert beat(six, retention, limit=2) == [*"01"]
