"""Changes of waiting tasks and of dead letters: their previews, their effect, and wrong values."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from html import unescape
from typing import Any

import pytest

from tests.dashboard.test_changes import hidden_fields
from tests.integration.shop import claim, dead_letter, send


def post(client: Any, path: str, **fields: str) -> str:
    """Ask for a change and follow it; return the text of the page."""
    text = client.post(f"/dq/{path}", fields, follow=True).content.decode()
    return str(text)


@pytest.fixture
def task(shop: Any) -> dict[str, str]:
    (task_id,) = send(shop, "a")
    send(shop, "m", queue="mail")
    return {"queue": "push", "id": task_id}


def test_a_task_is_rescheduled(shop: Any, operator: Any, task: dict[str, str]) -> None:
    assert "is delayed now" in post(operator, "message/reschedule/", **task, due="2100-01-01T18:00")
    (found,) = shop.dq.find(task["id"])
    assert (found.state, found.due) == ("delayed", datetime(2100, 1, 1, 18, tzinfo=timezone.utc))
    post(operator, "message/reschedule/", **task, due="1h")
    (found,) = shop.dq.find(task["id"])
    assert 3500 < (found.due - datetime.now(timezone.utc)).total_seconds() <= 3600
    assert "give a time in UTC" in post(operator, "message/reschedule/", **task, due="in-a-while")
    claim(shop)


def test_a_task_that_a_worker_has_stays(shop: Any, operator: Any, task: dict[str, str]) -> None:
    claim(shop)
    for path, field in (("reschedule", {"due": "1h"}), ("reprioritise", {"priority": "3"})):
        assert "was not changed, because a worker has it" in post(
            operator, f"message/{path}/", **task, **field
        )
    page = post(operator, "message/move/", **task, to="mail", confirmed="1")
    assert "was not changed, because a worker has it" in page
    gone = {**task, "id": "nowhere"}
    assert "is not in this queue any more" in post(operator, "message/reprioritise/", **gone, priority="3")
    assert "Reschedule" not in operator.get("/dq/message/", {"id": task["id"]}).content.decode()


def test_a_task_that_a_worker_has_is_not_moved_with_an_interrupted_move(
    shop: Any, operator: Any, task: dict[str, str]
) -> None:
    claim(shop)
    (left,) = send(shop, "b")
    with shop.dq._broker.open_home("push") as (partition, client):
        partition.take("move:mail:", [left], lease_ms=60_000).run(client)
    page = post(operator, "message/move/", **task, to="mail", confirmed="1")
    assert "was moved" not in page
    assert shop.dq.queues["mail"].find(left) is not None


def test_a_task_moves_to_another_queue_that_exists(shop: Any, operator: Any, task: dict[str, str]) -> None:
    asked = post(operator, "message/move/", **task, to="mail")
    assert "goes to the end of &#x27;mail&#x27;" in asked
    assert shop.dq.find(task["id"])[0].queue == "push"
    assert "was moved to &#x27;mail&#x27;" in post(operator, "message/move/", **hidden_fields(asked))
    assert shop.dq.find(task["id"])[0].queue == "mail"
    assert "there is no such queue" in post(operator, "message/move/", **task, to="nail")


def test_hidden_arguments_of_a_task_are_replaced_unseen(shop: Any, operator: Any) -> None:
    (task_id,) = send(shop, "secret")
    place = {"queue": "push", "id": task_id}
    asked = post(operator, "message/arguments/edit/", **place, args='["open", 1]')
    for page in (operator.get("/dq/message/arguments/", place).content.decode(), asked):
        assert "secret" not in page
    post(operator, "message/arguments/edit/", **hidden_fields(asked))
    assert shop.dq.find(task_id)[0].args == "('open', 1)"


@pytest.mark.parametrize("state", ["waiting", "delayed", "dead"])
def test_a_second_message_of_a_task_is_opened_from_its_list(shop: Any, operator: Any, state: str) -> None:
    notify = shop.tasks["notify"]
    for _ in range(2):
        notify.apply_async(("a",), task_id="twice~0", countdown=3600 if state == "delayed" else None)
    with shop.dq._broker.open_home("push") as (partition, client):
        # The first one runs, and asks for a retry: its message ends.
        (entry,) = partition.take("w", ["twice~~0"], lease_ms=60_000).run(client)
        partition.ack("w", finish=[entry.tag]).run(client)
    if state == "dead":
        (entry,) = claim(shop)
        with shop.dq._broker.open_home("push") as (partition, client):
            partition.dead_letter("worker:1", entry.tag, reason="rejected", worker="w").run(client)
    pages = {"waiting": "tenant", "delayed": "queue", "dead": "dead-letters"}
    page = operator.get(f"/dq/{pages[state]}/", {"queue": "push", "tenant": "a"})
    (address,) = {*re.findall(r'href="(/dq/message/[^"]*)"', page.content.decode())}
    page = operator.get(unescape(address)).content.decode()
    assert f'class="chip {state}">{state}<' in page
    assert "Task twice~0 (notify) in &#x27;push&#x27;" in page
    if state != "dead":
        assert "is cancelled" in post(operator, "message/cancel/", **hidden_fields(page), confirmed="1")


@pytest.mark.parametrize("text", ['["\\ud800"]', "[NaN]", "[" * 900 + "]" * 900, "[" + "9" * 5000 + "]"])
def test_unusual_json_is_no_fault_of_the_dashboard(operator: Any, task: dict[str, str], text: str) -> None:
    answer = operator.post("/dq/message/arguments/edit/", {**task, "args": text, "confirmed": "1"})
    assert answer.status_code in (302, 400)
    assert operator.get("/dq/message/", {"id": task["id"]}).status_code == 200
    assert operator.get("/dq/message/arguments/", task).status_code in (200, 302, 400)


@pytest.fixture
def dead(use_app: Any, redis_url: str) -> Any:
    """An app that shows arguments, with a dead letter; its id is ``dead.letter``."""
    shop = use_app(redis_url.replace("redis://", "dq-redis://", 1), dq_web_show_arguments=True)
    shop.letter = dead_letter(shop, "a")
    return shop


def test_a_confirmed_edit_changes_only_the_parts_of_its_preview(dead: Any, operator: Any) -> None:
    (task_id,) = send(dead, "a")
    dead.dq.queues["push"].edit(task_id, args=["a"])
    place = {"queue": "push", "id": task_id}
    asked = post(operator, "message/arguments/edit/", **place, args='["b"]', kwargs="{}")
    dead.dq.queues["push"].edit(task_id, kwargs={"order": "of another operator"})
    post(operator, "message/arguments/edit/", **hidden_fields(asked))
    assert dead.dq.queues["push"].arguments(task_id) == (["b"], {"order": "of another operator"})


def test_arguments_of_a_waiting_task_are_changed_after_a_preview(dead: Any, operator: Any) -> None:
    (task_id,) = send(dead, "b")
    place = {"queue": "push", "id": task_id}
    page = operator.get("/dq/message/arguments/", place).content.decode()
    assert "[&quot;b&quot;, 0]</textarea>" in page
    assert "nothing was changed" in post(operator, "message/arguments/edit/", **place, args='["b", 0]')
    assert "is not JSON" in post(operator, "message/arguments/edit/", **place, args="[")
    asked = post(operator, "message/arguments/edit/", **place, args='["b", 7]', kwargs="")
    assert "<bdi>[&quot;b&quot;, 0]</bdi>" in asked
    assert "kwargs</bdi>" not in asked
    assert dead.dq.find(task_id)[0].args == "('b', 0)"
    assert "has other arguments now" in post(operator, "message/arguments/edit/", **hidden_fields(asked))
    assert dead.dq.find(task_id)[0].args == "('b', 7)"
    (entry,) = [each for each in dead.dq.audit() if each.action == "edited"]
    assert (entry.details, entry.count) == (f"{task_id}: args", 1)
    claim(dead)
    page = post(operator, "message/arguments/edit/", **hidden_fields(asked))
    assert "does not wait in &#x27;push&#x27; any more" in page
    assert "Edit arguments" not in operator.get("/dq/message/", {"id": task_id}).content.decode()


def test_a_dead_letter_is_changed_after_a_preview_of_the_differences(dead: Any, operator: Any) -> None:
    page = operator.get("/dq/dead-letters/letter/", {"queue": "push", "id": dead.letter}).content.decode()
    assert "[&quot;a&quot;, 0]</textarea>" in page
    same = {"queue": "push", "id": dead.letter, "args": '["a", 0]', "kwargs": "{}", "tenant": "a"}
    same |= {"priority": "0", "eta": ""}
    assert "nothing was changed" in post(operator, "dead-letters/letter/edit/", **same)
    wanted = {"args": '["z", 5]', "tenant": "z", "priority": "9", "eta": "2100-01-01T00:00"}
    asked = post(operator, "dead-letters/letter/edit/", **{**same, **wanted})
    for text in ("[&quot;a&quot;, 0]", "[&quot;z&quot;, 5]", "2100-01-01T00:00"):
        assert f"<bdi>{text}</bdi>" in asked
    assert "kwargs</bdi>" not in asked
    assert len(dead.dq.dead_letters["push"]) == 1
    assert "was changed and sent again" in post(operator, "dead-letters/letter/edit/", **hidden_fields(asked))
    (found,) = dead.dq.find(dead.letter)
    assert (found.state, found.tenant, found.priority) == ("delayed", "z", 9)
    assert found.due == datetime(2100, 1, 1, tzinfo=timezone.utc)
    assert dead.dq.audit()[0].action == "dead_edited"


def test_a_tenant_with_a_blank_at_its_end_stays_the_tenant(dead: Any, operator: Any) -> None:
    letter = dead_letter(dead, " a ")
    place = {"queue": "push", "id": letter}
    page = operator.get("/dq/dead-letters/letter/", {**place, "format": "json"})
    shown = json.loads(page.content)["values"]
    assert "nothing was changed" in post(operator, "dead-letters/letter/edit/", **place, **shown)
    urgent = {**shown, "priority": " 9 ", "confirmed": "1"}
    post(operator, "dead-letters/letter/edit/", **place, **urgent)
    (found,) = dead.dq.find(letter)
    assert (found.tenant, found.priority) == (" a ", 9)


def test_hidden_arguments_are_kept_and_not_shown(dead: Any, login: Any) -> None:
    editor = login("view_queues", "edit_dead_letters")
    letter = {"queue": "push", "id": dead.letter}
    data = json.loads(editor.get("/dq/dead-letters/letter/", {**letter, "format": "json"}).content)
    assert (data["values"]["args"], data["letter"]["args"]) == ("", "(hidden)")
    asked = post(editor, "dead-letters/letter/edit/", **letter, args="", priority="5", tenant="a")
    assert "(hidden)" not in asked
    asked = post(editor, "dead-letters/letter/edit/", **letter, args='["b"]', priority="5", tenant="a")
    assert "<bdi>(hidden)</bdi>" in asked
    post(editor, "dead-letters/letter/edit/", **letter, args="", priority="5", tenant="a", confirmed="1")
    (found,) = dead.dq.find(dead.letter)
    assert (found.priority, found.args) == (5, "('a', 0)")


@pytest.mark.parametrize("confirmed", [{}, {"confirmed": "1"}])
def test_a_guess_of_hidden_arguments_has_the_answer_of_a_change(
    dead: Any, login: Any, confirmed: dict[str, str]
) -> None:
    editor = login("view_queues", "edit_messages", "edit_dead_letters")
    letters = [dead_letter(dead, "a") for _ in range(3)]
    messages = send(dead, *"aaa")
    guesses = [{"args": '["a", 0]'}, {"args": '["b", 7]'}, {"kwargs": "{}"}]
    others = {"queue": "push", "tenant": "a", "priority": "0", "eta": "", **confirmed}
    for path, ids in (("message/arguments/edit/", messages), ("dead-letters/letter/edit/", letters)):
        answers = {
            editor.post(f"/dq/{path}", {**others, "id": each, **guess}).status_code
            for each, guess in zip(ids, guesses, strict=True)
        }
        assert answers == {302 if confirmed else 200}


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"args": "[1"}, "is not JSON"),
        ({"args": "{}"}, "give a list"),
        ({"kwargs": "[" * 100_001}, "the form takes 100000 characters"),
        ({"kwargs": "[1]"}, "give a dict"),
        ({"priority": "10"}, "give a number from 0 to 9"),
        ({"eta": "soon"}, "eta = &#x27;soon&#x27;"),
        ({"id": "nowhere"}, "has no dead letter"),
    ],
)
def test_a_wrong_change_of_a_dead_letter_sends_nothing(
    dead: Any, operator: Any, field: dict[str, str], reason: str
) -> None:
    given = {"queue": "push", "id": dead.letter, "confirmed": "1", **field}
    answer = operator.post("/dq/dead-letters/letter/edit/", given)
    assert (answer.status_code, reason in answer.content.decode()) == (400, True), answer.content.decode()
    assert len(dead.dq.dead_letters["push"]) == 1
