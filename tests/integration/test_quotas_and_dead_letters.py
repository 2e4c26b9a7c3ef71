"""``app.dq.quotas``, ``app.dq.dead_letters`` and ``app.dq.explain`` on a real Redis, without a worker."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_dq.errors import InvalidMessage, InvalidRequest, InvalidTenant
from celery_dq.options import Quota
from tests.integration.shop import claim, dead_letter, receive, send

# Quotas.


def test_a_quota_is_set_part_by_part_and_removed(shop: Any) -> None:
    quotas = shop.dq.quotas
    quotas.set("push", 42, rate="50/s", burst=10)
    assert quotas.set("push", "42", concurrency=8) == Quota(rate=50, burst=10, concurrency=8)
    assert quotas.list("push") == {"42": Quota(rate=50, burst=10, concurrency=8)}
    quotas.remove("push", 42)
    assert quotas.get("push", 42) == Quota()
    assert quotas.list("push") == {}


def test_a_default_reaches_the_backlog_of_every_tenant(shop: Any) -> None:
    quotas, queue = shop.dq.quotas, shop.dq.queues["push"]
    send(shop, *range(30))
    quotas.set("push", 0, weight=2)
    quotas.set_default("push", paused=True)
    assert quotas.get("push", 1).paused
    (of_0,) = queue.peek(1, tenant=0)
    assert [entry.id for entry in claim(shop, want=50)] == [of_0.id]
    assert queue.snapshot().paused == 29
    quotas.remove_default("push")
    assert queue.snapshot().paused == 0
    assert len(claim(shop, want=50)) == 29


def test_pause_and_resume_leave_no_trace(shop: Any) -> None:
    send(shop, "a", "b")
    shop.dq.quotas.pause("push", "a")
    assert [message.tenant for message in shop.dq.queues["push"].peek()] == ["b", "a"]
    assert shop.dq.queues["push"].snapshot().paused == 1
    shop.dq.quotas.resume("push", "a")
    assert shop.dq.quotas.list("push") == {}
    assert len(claim(shop, want=5)) == 2


def test_a_tenant_follows_a_default_that_changed_while_it_was_paused(shop: Any) -> None:
    quotas = shop.dq.quotas
    quotas.set_default("push", rate=5)
    assert quotas.pause("push", "a") == Quota(rate=5, paused=True)
    quotas.set_default("push", rate=50)
    assert quotas.get("push", "a") == Quota(rate=50, paused=True)
    assert quotas.list("push") == {}
    assert quotas.resume("push", "a") == Quota(rate=50)
    quotas.remove_default("push")
    assert quotas.get("push", "a") == Quota()


def test_a_pause_outlives_changes_of_the_quota(shop: Any) -> None:
    quotas = shop.dq.quotas
    send(shop, "a")
    quotas.set("push", "a", weight=2)
    quotas.pause("push", "a")
    assert quotas.set("push", "a", weight=3) == Quota(weight=3, paused=True)
    quotas.remove("push", "a")
    assert claim(shop) == []
    assert quotas.resume("push", "a") == Quota()
    assert len(claim(shop)) == 1


def test_a_pause_may_be_set_as_a_part(shop: Any) -> None:
    quotas = shop.dq.quotas
    assert quotas.set("push", "a", paused=True) == Quota(paused=True)
    assert quotas.set("push", "a", paused=True, weight=2) == Quota(weight=2, paused=True)
    assert quotas.list("push") == {"a": Quota(weight=2)}
    assert quotas.set("push", "a", paused=False) == Quota(weight=2)
    # One tenant may run under a default that pauses all tenants.
    quotas.set_default("push", paused=True)
    assert quotas.resume("push", "b") == Quota(paused=True)
    assert "app.dq.quotas.set('push', 'b', paused=False)" in str(paused_tenant(shop, "b"))
    assert quotas.set("push", "b", paused=False) == Quota()
    assert quotas.list("push") == {"a": Quota(weight=2), "b": Quota()}


def paused_tenant(shop: Any, tenant: str) -> Any:
    send(shop, tenant)
    found = shop.dq.explain(tenant=tenant, queue="push")
    assert found.reason == "paused"
    return found


def test_paused_tenants_are_listed_with_the_time(shop: Any) -> None:
    quotas = shop.dq.quotas
    quotas.pause("push", "a")
    (first,) = quotas.paused("push").items()
    quotas.pause("push", "a")
    quotas.pause("push", "b")
    paused = quotas.paused("push")
    assert list(paused) == ["a", "b"]
    assert paused["a"] == first[1]
    assert abs(datetime.now(timezone.utc) - first[1].since) < timedelta(minutes=2)
    assert paused_tenant(shop, "a").sentence.count("resume('push', 'a')") == 1


# Dead letters.


def test_dead_letters_are_listed_replayed_and_purged(shop: Any) -> None:
    first, second, third = dead_letter(shop, "a"), dead_letter(shop, "b"), dead_letter(shop, "c")
    dead = shop.dq.dead_letters["push"]
    assert [(letter.id, letter.reason, letter.tenant) for letter in dead.list()] == [
        (third, "rejected", "c"),
        (second, "rejected", "b"),
        (first, "rejected", "a"),
    ]
    assert dead.list(1, offset=1)[0].id == second
    assert dead.list()[0].worker == "worker:1"
    assert dead.list()[0].task == "notify"
    assert dead.replay(second) == 1
    assert dead.replay(second) == 0
    assert shop.dq.find(second)[0].state == "waiting"
    assert dead.purge(first) == 1
    assert len(dead) == 1
    assert dead.replay() == 1
    assert dead.purge() == 0
    assert [entry.id for entry in claim(shop, want=5)] == [second, third]


def test_a_dead_letter_is_edited_and_sent_again(shop: Any) -> None:
    task_id = dead_letter(shop, "a")
    dead = shop.dq.dead_letters["push"]
    with pytest.raises(InvalidMessage, match="'argz'"):
        dead.edit(task_id, argz=())
    with pytest.raises(InvalidTenant):
        dead.edit(task_id, tenant="\n")
    assert dead.edit(task_id, args=("z", 9), tenant="z", priority=3) is not None
    assert dead.edit(task_id, tenant="z") is None
    message = receive(shop)
    assert message.decode()[:2] == [["z", 9], {}]
    assert (message.properties["tenant"], message.properties["priority"]) == ("z", 3)
    assert message.headers["argsrepr"] == "('z', 9)"


# Explaining.


def test_a_waiting_task_is_explained_by_its_tenant(shop: Any) -> None:
    first, second = send(shop, "a", "a")
    explain = shop.dq.explain
    assert (explain(task_id=first).reason, explain(task_id=second).reason) == ("no-worker", "behind")
    assert "behind 1 message of tenant 'a'" in str(explain(task_id=second))
    shop.dq.quotas.pause("push", "a")
    assert explain(task_id=first).reason == "paused"
    assert "app.dq.quotas.resume('push', 'a')" in str(explain(tenant="a", queue="push"))
    shop.dq.quotas.set("push", "a", paused=False, concurrency=1)
    claim(shop)
    assert explain(task_id=first).reason == "running"
    limited = explain(tenant="a", queue="push")
    assert (limited.reason, limited.until) == ("concurrency", None)
    assert "1 of 1 run at once" in str(limited)


def test_a_throttled_tenant_knows_until_when(shop: Any) -> None:
    shop.dq.quotas.set("push", "a", rate="1/m")
    send(shop, "a", "a")
    assert len(claim(shop, want=5)) == 1
    found = shop.dq.explain(tenant="a", queue="push")
    assert (found.state, found.reason) == ("throttled", "rate")
    assert found.until is not None
    assert timedelta(seconds=30) < found.until - datetime.now(timezone.utc) <= timedelta(seconds=60)


def test_an_eligible_tenant_waits_for_its_turn(shop: Any) -> None:
    send(shop, "z", "a", "b")
    claim(shop)
    found = shop.dq.queues["push"].explain("z")
    assert (found.reason, found.state) == ("turn", "eligible")
    assert "after 1 other tenant" in found.sentence


def test_every_other_state_is_explained(shop: Any) -> None:
    delayed, dead = send(shop, "a", countdown=100)[0], dead_letter(shop)
    explain = shop.dq.explain
    assert explain(task_id=delayed).reason == "eta"
    assert explain(task_id=delayed).until is not None
    assert explain(task_id=dead).reason == "dead"
    shop.dq.queues["push"].cancel(delayed)
    assert explain(task_id=delayed).reason == "cancelled"
    assert explain(task_id="never").reason == "unknown"
    assert explain(tenant="absent", queue="push").reason == "empty"
    with pytest.raises(InvalidRequest, match="task_id=…, or tenant=… together with queue="):
        explain(tenant="a")
