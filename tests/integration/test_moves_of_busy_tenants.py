"""Tenants whose messages change their places while the mover looks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_dq import TenantMoving
from celery_dq.app.api import tenant_moves
from celery_dq.inspector.redis_values import scan_all
from celery_dq.transport.redis.store.partition_map import PartitionMap
from tests.integration.partitioned_shop import claim_in, opened
from tests.integration.shop import send
from tests.integration.test_tenant_moves import MOVING

CHANGE = PartitionMap(7, 4)
OLD, NEW = CHANGE.old_partitions(MOVING)[0], CHANGE.home(MOVING)


def before_scan(
    app: Any, patch: pytest.MonkeyPatch, place: str, action: Callable[[Any, Any], object]
) -> None:
    """Run an action in the former home before the mover reads a key there for the first time."""
    with opened(app) as (partitions, _):
        wanted = getattr(partitions[OLD].keys, place)
    actions = [action]

    def scan(kind: Any, key: str, most: int | None = None) -> Any:
        if key == wanted and actions:
            with opened(app) as (partitions, client):
                actions.pop()(partitions[OLD], client)
        return scan_all(kind, key, most)

    patch.setattr(tenant_moves, "scan_all", scan)


def send_keyed(app: Any) -> str:
    """Publish a message that stays in the former home, because its dedup lock is there; return its id."""
    return str(app.tasks["notify"].apply_async((MOVING, 1), dedup={"key": "{order}"}).id)


def claim_in_former_home(app: Any) -> list[str]:
    with opened(app) as (partitions, client):
        claimed = partitions[OLD].claim("worker:1", lease_ms=60_000, want=9).run(client)
        return [entry.id for entry in claimed.entries]


def test_a_message_that_is_released_meanwhile_moves(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = send(wide, MOVING)
    (entry,) = claim_in(wide, MOVING)
    queue.pause(MOVING)

    def release(home: Any, client: Any) -> None:
        assert home.release("worker:1", [entry.tag], mode="unstarted").run(client) == 0

    before_scan(wide, monkeypatch, "running", release)
    queue.set_partitions(7, timeout=30)
    queue.resume(MOVING)
    assert [each.id for each in claim_in(wide, MOVING)] == ids


def test_a_message_that_is_resumed_meanwhile_holds_the_change_up(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.pause(MOVING)
    keyed = send_keyed(wide)
    before_scan(wide, monkeypatch, "paused", lambda home, client: queue.resume(MOVING))
    with pytest.raises(TenantMoving):
        queue.set_partitions(7, timeout=0)
    assert claim_in_former_home(wide) == [keyed]


def test_a_message_behind_a_dedup_lock_that_ends_meanwhile_holds_the_change_up(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_keyed(wide)
    (entry,) = claim_in(wide, MOVING)
    blocked = send_keyed(wide)

    def finish(home: Any, client: Any) -> None:
        assert home.ack("worker:1", finish=[entry.tag]).run(client) == 0

    before_scan(wide, monkeypatch, "running", finish)
    with pytest.raises(TenantMoving):
        queue.set_partitions(7, timeout=0)
    assert claim_in_former_home(wide) == [blocked]


def test_a_message_that_becomes_delayed_meanwhile_moves(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task_id,) = send(wide, MOVING)

    def reschedule(home: Any, client: Any) -> None:
        assert queue.reschedule(task_id, countdown=3600) == "delayed"

    before_scan(wide, monkeypatch, "turn", reschedule)
    queue.set_partitions(7, timeout=30)
    assert wide.dq.find(task_id)[0].partition == NEW


def test_a_message_that_becomes_a_dead_letter_meanwhile_moves(
    wide: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(wide, MOVING)
    (entry,) = claim_in(wide, MOVING)

    def reject(home: Any, client: Any) -> None:
        home.dead_letter("worker:1", entry.tag, reason="rejected", worker="worker:1").run(client)

    before_scan(wide, monkeypatch, "turn", reject)
    queue.set_partitions(7, timeout=30)
    with opened(wide) as (partitions, client):
        assert [client.hlen(each.keys.dead) for each in partitions] == [int(n == NEW) for n in range(7)]
