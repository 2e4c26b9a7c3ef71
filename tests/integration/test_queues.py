"""``app.dq.queues`` on a real Redis, without a worker: read, cancel, revoke, move."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis

from celery_dq.errors import InvalidRequest
from celery_dq.transport.redis.store.script_calls import ScriptCall
from tests.integration.shop import claim, dead_letter, send

# Reading.


def test_a_queue_is_counted_by_the_states_of_its_messages(shop: Any) -> None:
    send(shop, "a", "a", "b")
    send(shop, "c", countdown=100)
    queue = shop.dq.queues["push"]
    queue.cancel(send(shop, "d")[0])
    assert len([each for each in claim(shop, want=1) if not each.reason]) == 1
    dead_letter(shop)
    now = queue.snapshot()
    assert (now.waiting, now.delayed, now.held, now.discards, now.dead) == (2, 1, 2, 0, 1)
    assert queue.depth == 3
    assert [(consumer.name, consumer.held) for consumer in now.consumers] == [("worker:1", 2)]
    assert 0 < now.consumers[0].lease_s <= 60


def test_the_queues_are_those_declared_configured_or_known_to_the_server(shop: Any) -> None:
    shop.conf.dq_queues = {"configured": {"rate": 5}}
    shop.tasks["notify"].apply_async(("a",), queue="declared")
    assert list(shop.dq.queues) == ["configured", "declared", "push"]
    assert "declared" in shop.dq.queues
    assert len(shop.dq.queues) == 3
    assert ["push" in shop.dq.dead_letters, "other" in shop.dq.dead_letters] == [True, False]


def test_peek_shows_one_message_of_each_tenant_first(shop: Any) -> None:
    send(shop, "a", "a", "a", "b", "c")
    shop.dq.quotas.pause("push", "c")
    queue = shop.dq.queues["push"]
    assert [message.tenant for message in queue.peek()] == ["a", "b", "c", "a", "a"]
    assert [message.args for message in queue.peek(2, tenant="a")] == ["('a', 0)", "('a', 1)"]
    assert queue.peek(2, tenant="absent") == []
    assert queue.depth == 5


def test_peek_shows_delayed_messages_by_due_time(shop: Any) -> None:
    later, sooner = (send(shop, "a", countdown=seconds)[0] for seconds in (200, 100))
    found = shop.dq.queues["push"].peek(delayed=True)
    assert [message.id for message in found] == [sooner, later]
    assert found[0].due is not None
    assert abs(found[0].due - datetime.now(timezone.utc) - timedelta(seconds=100)) < timedelta(seconds=20)


def test_a_task_is_found_wherever_it_is(shop: Any) -> None:
    waiting, delayed = send(shop, "a")[0], send(shop, "b", countdown=100)[0]
    elsewhere = send(shop, "c", queue="other")[0]
    places = [
        (found.queue, found.state, found.tenant)
        for each in (waiting, delayed, elsewhere)
        for found in shop.dq.find(each)
    ]
    assert places == [("push", "waiting", "a"), ("push", "delayed", "b"), ("other", "waiting", "c")]
    claim(shop)
    assert shop.dq.find(waiting)[0].state == "claimed"
    assert shop.dq.find(waiting)[0].consumer == "worker:1"
    assert shop.dq.find(dead_letter(shop))[0].state == "dead"
    assert shop.dq.find("never-published") == []


def test_a_terminated_task_is_not_in_the_queues_that_have_its_tombstone(shop: Any) -> None:
    """A revoke leaves a tombstone in every queue, so none of them is the one that the task was in."""
    (task_id,) = send(shop, "a")
    send(shop, "a", queue="other")
    (entry,) = claim(shop)
    shop.dq.revoke([task_id])
    assert [(each.queue, each.state) for each in shop.dq.find(task_id)] == [("push", "claimed")]
    with shop.dq._broker.open_home("push") as (partition, client):
        partition.ack("worker:1", finish=[entry.tag]).run(client)
    assert shop.dq.find(task_id) == []
    explained = shop.dq.explain(task_id=task_id)
    assert (explained.queue, explained.reason) == ("", "cancelled")
    assert explained.sentence.startswith(f"Task {task_id} was cancelled and is in no queue")
    assert shop.dq.explain(task_id=task_id, queue="other").reason == "cancelled"


def test_a_foreign_record_is_shown_as_unreadable(shop: Any) -> None:
    (task_id,) = send(shop, "a")
    with shop.dq._broker.open_home("push") as (partition, client):
        record = client.hget(partition.keys.messages, task_id)
        client.hset(partition.keys.messages, task_id, record[:60] + b"\xff" * (len(record) - 60))
    assert "unreadable" in shop.dq.queues["push"].peek()[0].args


# Cancelling.


def test_a_cancelled_task_is_handed_over_only_to_be_discarded(shop: Any) -> None:
    waiting, delayed = send(shop, "a")[0], send(shop, "b", countdown=100)[0]
    queue = shop.dq.queues["push"]
    assert [queue.cancel(each) for each in (waiting, delayed, waiting)] == ["waiting", "delayed", "discarded"]
    assert sorted((entry.id, entry.reason) for entry in claim(shop, want=5)) == sorted(
        [(waiting, "cancelled"), (delayed, "cancelled")]
    )


def test_a_task_that_is_not_published_yet_can_be_cancelled(shop: Any) -> None:
    assert shop.dq.queues["push"].cancel("soon") == "tombstone"
    assert shop.dq.explain(task_id="soon").reason == "cancelled"
    shop.tasks["notify"].apply_async(("a",), task_id="soon")
    assert claim(shop)[0].reason == "cancelled"


def test_a_tenant_is_cancelled_with_its_delayed_messages(shop: Any) -> None:
    send(shop, *"ab" * 150)
    send(shop, "a", "b", "a", countdown=100)
    queue = shop.dq.queues["push"]
    assert queue.cancel_tenant("a") == 152
    assert (queue.snapshot().waiting, queue.snapshot().delayed, queue.snapshot().discards) == (150, 1, 152)
    assert queue.cancel_tenant("a") == 0
    assert "152 messages of 'push' that will not run" in str(shop.dq.explain(tenant="b", queue="push"))


def test_a_message_that_becomes_due_meanwhile_is_cancelled_with_its_tenant(shop: Any) -> None:
    send(shop, "a")
    (delayed,) = send(shop, "a", countdown=100)
    queue = shop.dq.queues["push"]

    def become_due(_: int) -> None:
        queue.reschedule(delayed, countdown=0)
        claim(shop, want=0)  # promotes what is due

    assert queue.cancel_tenant("a", on_progress=become_due) == 2
    assert queue.depth == 0


def test_messages_behind_a_dedup_lock_are_cancelled_with_their_tenant(shop: Any) -> None:
    def call(tenant: str, task_id: str) -> None:
        shop.tasks["notify"].apply_async((tenant,), task_id=task_id, dedup={"key": "k"})

    call("a", "head")
    (head,) = claim(shop)
    for task_id in ("tail", "follower"):
        call("a", task_id)
    call("b", "of another tenant")
    queue = shop.dq.queues["push"]
    assert queue.cancel_tenant("a", dry_run=True) == 2
    assert queue.cancel_tenant("a") == 2
    with shop.dq._broker.open_home("push") as (partition, client):
        assert partition.ack("worker:1", finish=[head.tag]).run(client) == 0
    assert {(entry.id, entry.reason) for entry in claim(shop, want=9)} == {
        ("tail", "cancelled"),
        ("follower", "cancelled"),
        ("of another tenant", ""),
    }


def test_a_task_name_is_cancelled_for_all_tenants_and_ids(shop: Any) -> None:
    for _ in range(3):
        shop.tasks["invoice"].apply_async(("b",), task_id="same~1")
    send(shop, *range(120))
    send(shop, "a", countdown=100)
    queue = shop.dq.queues["push"]
    assert queue.cancel_task_name("notify") == 121
    assert queue.cancel_task_name("invoice") == 1
    assert queue.depth == 0


def test_purge_removes_without_bookkeeping(shop: Any) -> None:
    send(shop, *range(5))
    send(shop, "a", countdown=100)
    queue = shop.dq.queues["push"]
    assert queue.purge() == 6
    assert claim(shop) == []


# Revoking.


def test_revoke_lasts_without_any_worker(shop: Any) -> None:
    result = shop.tasks["notify"].delay("a")
    other = send(shop, "b", queue="other")[0]
    result.revoke()
    shop.control.revoke([other, "not-yet"])
    assert [entry.reason for entry in claim(shop, want=5)] == ["cancelled"]
    assert [entry.reason for entry in claim(shop, want=5, queue="other")] == ["cancelled"]
    shop.tasks["notify"].apply_async(("a",), task_id="not-yet", queue="other")
    assert [entry.reason for entry in claim(shop, want=5, queue="other")] == ["cancelled"]


# Moving.


def test_a_tenant_is_moved_in_order_and_nothing_is_lost(shop: Any) -> None:
    sent = send(shop, *["a"] * 230)
    stays = send(shop, "b")
    queue = shop.dq.queues["push"]
    assert queue.move("other", tenant="a") == 230
    assert [message.id for message in shop.dq.queues["other"].peek(500)] == sent
    assert [message.id for message in queue.peek()] == stays
    assert queue.snapshot().held == 0
    assert queue.snapshot().consumers == ()


def test_the_only_message_of_a_tenant_is_moved(shop: Any) -> None:
    task_id = shop.tasks["notify"].apply_async(("a", 1), tenant="alone", queue="push").id
    assert shop.dq.queues["push"].move("other", tenant="alone") == 1
    assert [message.id for message in shop.dq.queues["other"].peek(10)] == [task_id]


def test_a_task_is_moved_with_its_eta_tenant_and_priority(shop: Any) -> None:
    (task_id,) = send(shop, "vip", countdown=100, priority=7)
    assert shop.dq.queues["push"].move("other", task_id=task_id) == 1
    (found,) = shop.dq.find(task_id)
    assert (found.queue, found.state, found.tenant, found.priority) == ("other", "delayed", "vip", 7)


def test_a_message_of_a_worker_is_not_moved(shop: Any) -> None:
    (task_id,) = send(shop, "a")
    claim(shop)
    assert shop.dq.queues["push"].move("other", task_id=task_id) == 0
    assert shop.dq.queues["push"].move("other", task_id="unknown") == 0
    assert shop.dq.find(task_id)[0].state == "claimed"


def test_a_push_of_a_move_without_an_answer_is_repeated_without_effect(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = send(shop, "a", "a", "a")
    run, pushes = ScriptCall.run, list[str]()

    def run_and_lose_an_answer(call: ScriptCall[Any], client: Any) -> Any:
        answer = run(call, client)
        if call.script.name == "push":
            pushes.append(call.script.name)
            if len(pushes) == 1:
                raise redis.ConnectionError("the answer is lost")
        return answer

    monkeypatch.setattr(ScriptCall, "run", run_and_lose_an_answer)
    assert shop.dq.queues["push"].move("other", tenant="a") == 3
    assert len(pushes) == 2
    assert [each.id for each in shop.dq.queues["other"].peek()] == sent
    assert shop.dq.queues["push"].depth == 0


@pytest.mark.parametrize("countdown", [None, 100])
def test_a_mover_that_dies_releases(shop: Any, countdown: int | None) -> None:
    (task_id,) = send(shop, "a", countdown=countdown)
    with shop.dq._broker.open_home("push") as (partition, client):
        assert len(partition.take("move:dead", [task_id], lease_ms=1).run(client)) == 1
        assert shop.dq.find(task_id)[0].state == "claimed"
        while not partition.heartbeat("worker:1", lease_ms=60_000).run(client).reaped:
            pass
    assert shop.dq.find(task_id)[0].state == ("delayed" if countdown else "waiting")


def test_a_moved_message_keeps_the_id_of_its_task(shop: Any) -> None:
    for _ in range(2):
        shop.tasks["notify"].apply_async(("a",), task_id="twice")
    assert shop.dq.queues["push"].move("other", tenant="a") == 2
    assert [each.id for each in shop.dq.queues["other"].peek()] == ["twice", "twice~1"]
    assert shop.dq.find("twice~1") == []


def test_messages_of_a_singleton_queue_move_when_it_is_an_ordinary_one(shop: Any) -> None:
    (task_id,) = send(shop, "a")
    queue = shop.dq.queues["push"]
    with shop.dq._broker.open_home("push") as (partition, client):
        partition.fence(3).run(client)
    for chosen in ({"task_id": task_id}, {"tenant": "a"}):
        for dry_run in (True, False):
            with pytest.raises(InvalidRequest, match="'push' is a singleton queue.*leaders push --forget"):
                queue.move("other", dry_run=dry_run, **chosen)
    assert shop.dq.leaders.forget("push")
    assert queue.move("other", task_id=task_id) == 1


def test_a_move_needs_one_thing_and_another_queue(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    for wrong in ({}, {"task_id": "a", "tenant": "b"}):
        with pytest.raises(InvalidRequest, match="exactly one of"):
            queue.move("other", **wrong)
    with pytest.raises(InvalidRequest, match="the source itself"):
        queue.move("push", tenant="a")
