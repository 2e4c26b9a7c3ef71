"""Pauses, edits, bulk changes and their audit on a queue with four partitions."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_dq.errors import InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetterFilter
from celery_dq.keys import queue_registry
from tests.integration.partitioned_shop import (
    A2,
    COUNT,
    TENANTS,
    A,
    B,
    C,
    D,
    claim_in,
    dead_letter_of,
    opened,
)
from tests.integration.shop import send


def audited(app: Any) -> list[tuple[str, str, int]]:
    """Action, tenant and count of each change, the earliest first."""
    return [(each.action, each.tenant, each.count) for each in reversed(app.dq.audit())]


# Pauses.


def test_a_pause_of_the_queue_holds_in_all_partitions_until_one_time(wide: Any, queue: Any) -> None:
    send(wide, *TENANTS)
    assert queue.backlogs().runnable == COUNT
    pause = queue.pause(until=timedelta(hours=1))
    now = queue.snapshot()
    assert now.pause == pause
    assert {each.pause.until for each in now.partitions} == {pause.until}
    assert queue.backlogs().runnable == 0
    assert [claim_in(wide, tenant) for tenant in TENANTS] == [[]] * COUNT
    assert "the queue is paused until" in queue.explain(D).sentence
    assert queue.resume()
    assert not queue.resume()
    assert [len(claim_in(wide, tenant)) for tenant in TENANTS] == [1] * COUNT
    assert audited(wide) == [("paused", "", 1), ("resumed", "", 1)]


def test_a_pause_that_reached_some_partitions_is_completed_by_another_call(wide: Any, queue: Any) -> None:
    wide.dq.quotas.set_default("push", rate=5)  # declares the queue
    with opened(wide) as (partitions, client):
        partitions[0].pause(None).run(client)
    assert queue.snapshot().pause is None
    assert [each.pause is not None for each in queue.snapshot().partitions] == [True, False, False, False]
    queue.pause()
    assert queue.snapshot().pause is not None
    assert audited(wide)[1:] == [("paused", "", 1)]
    with opened(wide) as (partitions, client):
        partitions[0].resume(None).run(client)
    assert queue.resume()


def test_a_pause_whose_end_is_over_changes_no_partition(wide: Any, queue: Any) -> None:
    with pytest.raises(InvalidRequest, match="this time is over"):
        queue.pause(until=datetime(2020, 1, 1, tzinfo=timezone.utc))
    assert [each.pause for each in queue.snapshot().partitions] == [None] * COUNT
    assert audited(wide) == []


def test_a_tenant_is_paused_in_its_home(wide: Any, queue: Any) -> None:
    send(wide, *TENANTS)
    pause = queue.pause(D, until=timedelta(hours=1))
    assert wide.dq.quotas.paused("push") == {D: pause}
    assert [len(claim_in(wide, tenant)) for tenant in TENANTS] == [1, 1, 1, 0]
    (row,) = (each for each in queue.tenants() if each.tenant == D)
    assert (row.state, row.until) == ("paused", pause.until)
    assert queue.resume(D)
    assert len(claim_in(wide, D)) == 1
    assert audited(wide) == [("paused", D, 1), ("resumed", D, 1)]


# Backlogs.


def test_backlogs_are_those_of_all_partitions(wide: Any, queue: Any) -> None:
    send(wide, A, A2, A2, B, C, D, D, D)
    wide.dq.quotas.pause("push", B)
    wide.dq.quotas.set("push", C, rate=0.001)
    wide.dq.quotas.set("push", D, concurrency=2)
    queue.cancel(send(wide, A)[0])
    found = queue.backlogs(3)
    # B waits, and one of D for another; the cancelled task of A is to be recorded.
    assert found.runnable == 5 + 1 + 1
    assert [(each.queue, each.tenant, each.waiting) for each in found.largest][:2] == [
        ("push", D, 3),
        ("push", A2, 2),
    ]
    assert all(each.oldest_waiting_s is not None for each in found.largest)
    assert len(queue.backlogs(99).largest) == 5


# Bulk changes.


def test_a_purge_counts_first_and_reports_its_progress(wide: Any, queue: Any) -> None:
    send(wide, *TENANTS, *TENANTS)
    assert queue.purge(dry_run=True) == 2 * COUNT
    done: list[int] = []
    assert queue.purge(on_progress=done.append) == 2 * COUNT
    assert (done[-1], queue.depth) == (2 * COUNT, 0)
    assert audited(wide) == [("purged", "", 2 * COUNT)]


def test_tasks_are_cancelled_by_name_and_by_tenant(wide: Any, queue: Any) -> None:
    send(wide, *TENANTS, D, D)
    send(wide, D, countdown=3_600)
    wide.tasks["invoice"].apply_async((D,))
    assert queue.cancel_tenant(D, dry_run=True) == 5
    assert queue.cancel_task_name("notify", dry_run=True) == COUNT + 3
    done: list[int] = []
    assert queue.cancel_task_name("notify", on_progress=done.append) == COUNT + 3
    assert (sorted(done), done[-1]) == (done, COUNT + 3)
    assert queue.cancel_task_name("notify", dry_run=True) == 0
    done.clear()
    assert queue.cancel_tenant(D, on_progress=done.append) == 1
    assert done == [1]
    assert audited(wide) == [("cancelled", "", COUNT + 3), ("cancelled", D, 1)]


def test_a_move_counts_first_and_declares_nothing_then(wide: Any, queue: Any) -> None:
    wide.conf.dq_queues = {"push": {"partitions": COUNT}, "later": {"partitions": 2}}
    first, *_ = send(wide, C, D, D)
    assert queue.move("later", tenant=D, dry_run=True) == 2
    assert queue.move("later", task_id=first, dry_run=True) == 1
    assert queue.move("later", task_id="absent", dry_run=True) == 0
    with opened(wide) as (_, client):
        assert not client.sismember(queue_registry("online"), "later")
        assert client.keys("*later*") == []
    done: list[int] = []
    assert queue.move("later", tenant=D, on_progress=done.append) == 2
    assert queue.move("later", task_id=first) == 1
    assert done == [2]
    assert (queue.depth, wide.dq.queues["later"].depth) == (0, 3)
    assert audited(wide) == [("moved", D, 2), ("moved", "", 1)]


# Edits.


def test_a_task_is_edited_in_its_partition(wide: Any, queue: Any) -> None:
    ids = send(wide, *TENANTS)
    assert [queue.details(each).message.partition for each in ids] == [*range(COUNT)]
    for task_id in ids:
        assert queue.reprioritise(task_id, 7) == "waiting"
        assert queue.reschedule(task_id, countdown=3_600) == "delayed"
    assert [(queue.find(each).partition, queue.find(each).priority) for each in ids] == [
        (number, 7) for number in range(COUNT)
    ]
    assert [each.delayed for each in queue.snapshot().partitions] == [1] * COUNT
    assert queue.reschedule(ids[3], eta=datetime.now(timezone.utc)) == "delayed"
    assert claim_in(wide, D)[0].id == ids[3]
    assert queue.reprioritise(ids[3], 1) == "other"
    assert queue.reschedule("absent", countdown=1) == "none"
    wide.dq.revoke(["later"])
    assert queue.reprioritise("later", 1) == "none"
    assert [action for action, _, _ in audited(wide)] == ["reprioritised", "rescheduled"] * COUNT + [
        "rescheduled"
    ]


# Dead letters.


def test_dead_letters_of_all_partitions_are_shown_edited_and_purged(wide: Any, queue: Any) -> None:
    dead = wide.dq.dead_letters["push"]
    ids = [dead_letter_of(wide, tenant) for tenant in TENANTS]
    assert (len(dead), [each.id for each in dead.list()]) == (COUNT, ids[::-1])
    assert [each.id for each in dead.list(2, 1)] == ids[2:0:-1]
    assert [dead.show(each).letter.tenant for each in ids] == TENANTS
    assert dead.show(ids[3]).args == [D, 0]
    assert dead.show("absent") is None
    assert dead.edit(ids[3], args=[D, 5]) == ids[3]
    assert dead.edit("absent", args=[]) is None
    assert (dead.purge(ids[2], dry_run=True), dead.purge("absent", dry_run=True)) == (1, 0)
    assert dead.purge(ids[2]) == 1
    assert dead.purge(dry_run=True) == 2
    done: list[int] = []
    assert dead.purge(on_progress=done.append) == 2
    assert (done[-1], len(dead)) == (2, 0)
    assert audited(wide) == [("dead_edited", "", 1), ("dead_purged", "", 1), ("dead_purged", "", 2)]


def test_dead_letters_of_all_partitions_are_chosen_and_replayed(wide: Any, queue: Any) -> None:
    dead = wide.dq.dead_letters["push"]
    ids = [dead_letter_of(wide, tenant) for tenant in (*TENANTS, D)]
    only = DeadLetterFilter(tenant=D)
    assert dead.replay(wanted=only, dry_run=True) == 2
    assert (dead.replay(ids[0], dry_run=True), dead.replay("absent", dry_run=True)) == (1, 0)
    done: list[int] = []
    assert dead.replay(wanted=only, on_progress=done.append) == 2
    assert done == [1, 2]
    assert [each.waiting for each in queue.snapshot().partitions] == [0, 0, 0, 2]
    assert dead.replay(rate="1000/s") == 3
    assert [each.waiting for each in queue.snapshot().partitions] == [1, 1, 1, 2]
    assert audited(wide) == [("dead_replayed", D, 2), ("dead_replayed", "", 3)]


def test_the_latest_dead_letters_of_a_queue_are_within_its_limit_in_each_partition(
    wide: Any, queue: Any
) -> None:
    ids = [dead_letter_of(wide, tenant) for tenant in (A, D, D, D)]
    with opened(wide) as (partitions, client):
        for each in partitions:
            each.heartbeat("worker:1", lease_ms=60_000, retention=(0, 2)).run(client)
    assert [each.id for each in wide.dq.dead_letters["push"].list()] == [ids[3], ids[2], ids[0]]


# Locks.


def test_an_evicted_lock_is_one_entry_of_its_tenant(wide: Any, queue: Any) -> None:
    wide.tasks["notify"].apply_async((D,), dedup=True)
    locks = wide.dq.dedup["push"]
    (lock,) = locks.list()
    assert locks.release(lock.key, tenant=D) is not None
    assert audited(wide) == [("dedup_evicted", D, 1)]
