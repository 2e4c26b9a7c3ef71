"""``celery dq reschedule``, ``reprioritise`` and ``edit``."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from celery_dq.errors import InvalidPriority, InvalidRequest
from tests.dq_command import Run
from tests.integration.shop import claim, receive, send


def test_a_task_is_rescheduled(run: Run, shop: Any) -> None:
    (task_id,) = send(shop, "a")
    assert (
        run("reschedule", task_id, "--eta", "2100-01-01T00:00Z")
        == f"Task {task_id} is delayed in 'push' now.\n"
    )
    assert shop.dq.find(task_id)[0].due == datetime(2100, 1, 1, tzinfo=timezone.utc)
    run("reschedule", task_id, "--countdown", "2h")
    until = shop.dq.find(task_id)[0].due - datetime.now(timezone.utc)
    assert timedelta(hours=1.9) < until < timedelta(hours=2.1)
    assert json.loads(run("reschedule", task_id, "--countdown", "0", "--json")) == {"push": "delayed"}
    assert [each.id for each in claim(shop, want=5)] == [task_id]
    text = run("reschedule", task_id, "--countdown", "0", status=1)
    assert f"Task {task_id} was not changed: it is claimed in 'push'." in text
    assert [each.action for each in shop.dq.audit()] == ["rescheduled"] * 3


def test_a_task_gets_another_priority(run: Run, shop: Any) -> None:
    first, second = send(shop, "a", "a")
    assert run("reprioritise", second, "9") == f"Task {second} is waiting in 'push' now.\n"
    assert [(each.id, each.priority) for each in shop.dq.queues["push"].peek()] == [(second, 9), (first, 0)]
    assert receive(shop).properties["priority"] == 9
    assert "it is in no queue" in run("reprioritise", "x", "3", status=1)


def test_impossible_edits(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    for given in ({}, {"eta": datetime(2100, 1, 1), "countdown": 3}, {"countdown": -1}, {"countdown": 1e12}):
        with pytest.raises(InvalidRequest):
            queue.reschedule("x", **given)
    for year in (1960, 9999):
        with pytest.raises(InvalidRequest, match="eta = .*datetime of the years 1970 to 2254"):
            queue.reschedule("x", eta=datetime(year, 1, 1))
    with pytest.raises(InvalidPriority):
        queue.reprioritise("x", 10)
    assert (queue.reschedule("x", countdown=1), queue.reprioritise("x", 1)) == ("none", "none")


def test_a_task_is_not_rescheduled_past_its_expiry(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    (task_id,) = send(shop, "a", expires=3600)
    with pytest.raises(InvalidRequest, match=f"task {task_id} expires before that"):
        queue.reschedule(task_id, countdown=7200)
    assert shop.dq.audit() == []
    assert queue.reschedule(task_id, countdown=1800) == "delayed"


def test_a_rescheduled_task_sees_its_new_eta(shop: Any) -> None:
    queue = shop.dq.queues["push"]
    published = datetime(2100, 1, 1, tzinfo=timezone.utc)
    (task_id,) = send(shop, "a", eta=published)
    queue.reschedule(task_id, countdown=0)
    request = SimpleNamespace(request_dict={})
    receive(shop).pass_eta_to(request)
    shown = datetime.fromisoformat(request.request_dict["eta"])
    assert abs(datetime.now(timezone.utc) - shown) < timedelta(minutes=2)


def test_a_task_gets_other_arguments(run: Run, shop: Any) -> None:
    (task_id,) = send(shop, "a")
    (later,) = send(shop, "a", countdown=3600)
    text = run("edit", task_id, "--args", '["b"]', "--kwargs", '{"order": 5}')
    assert text == f"Task {task_id} is waiting in 'push' now.\n"
    assert json.loads(run("edit", later, "--args", '["c", 6]', "--json")) == {"push": "delayed"}
    queue = shop.dq.queues["push"]
    assert (queue.arguments(task_id), queue.arguments(later)) == (
        (["b"], {"order": 5}),
        (["c", 6], {}),
    )
    assert (queue.find(task_id).args, queue.find(task_id).tenant) == ("('b',)", "a")
    assert [(each.action, each.count) for each in shop.dq.audit()] == [("edited", 1)] * 2
    assert receive(shop).payload[:2] == [["b"], {"order": 5}]
    assert "Name --args, --kwargs or both." in run("edit", later, status=2)
    assert "is not JSON" in run("edit", later, "--args", "[", status=2)
    assert "give a list" in run("edit", later, "--args", "7", status=1)


def test_arguments_that_do_not_fit_the_task_are_refused(run: Run, shop: Any) -> None:
    notify = shop.tasks["notify"]
    (task_id,) = send(shop, "a")
    for given in (["--args", "[]"], ["--args", '["b", 1, 2]'], ["--kwargs", '{"note": 1}']):
        text = run("edit", task_id, *given, status=1)
        assert "edit: the new arguments do not fit task 'notify': notify() " in text
    assert shop.dq.queues["push"].arguments(task_id) == (["a", 0], {})
    shop.dq.queues["push"].edit(task_id, args=["b"], kwargs={"order": 1})
    # Celery checks neither of these.
    notify.typing = False
    shop.dq.queues["push"].edit(task_id, args=[])
    foreign = shop.send_task("elsewhere", ("a",), queue="push").id
    assert shop.dq.queues["push"].edit(foreign, args=[]) == "waiting"


def test_arguments_of_a_task_that_a_worker_has_stay(run: Run, shop: Any) -> None:
    (task_id,) = send(shop, "a")
    claim(shop)
    assert "it is claimed in 'push'" in run("edit", task_id, "--args", "[]", status=1)
    assert shop.dq.queues["push"].arguments(task_id) is None


def test_arguments_of_a_call_behind_a_dedup_lock_are_changed(run: Run, shop: Any) -> None:
    task = shop.tasks["notify"]
    task.apply_async(("a",), dedup={"key": "k"})
    claim(shop)
    behind = task.apply_async(("a",), dedup={"key": "k"})
    assert json.loads(run("edit", str(behind.id), "--args", '["b"]', "--json")) == {"push": "blocked"}
    assert shop.dq.find(str(behind.id))[0].args == "('b',)"


def test_an_edit_does_not_show_arguments_that_their_caller_hides(run: Run, shop: Any) -> None:
    (task_id,) = send(shop, "card 4111", argsrepr="(hidden)", kwargsrepr="{hidden}")
    (plain,) = send(shop, "b")
    queue = shop.dq.queues["push"]
    run("edit", task_id, "--kwargs", "{}")
    assert (queue.find(task_id).args, queue.find(task_id).kwargs) == ("(hidden)", "(edited)")
    run("edit", task_id, "--args", '["card 4222"]')
    assert queue.find(task_id).args == "(edited)"
    run("edit", plain, "--args", json.dumps(["b" * 100_000]))
    assert 1000 < len(queue.find(plain).args) < 1100
    assert queue.find(plain).kwargs == "{}"
