"""Changes by the dashboard: their effect, their preview, and the permission that each of them needs."""

from __future__ import annotations

import json
import logging
import re
from datetime import timedelta
from html import unescape
from typing import Any, NamedTuple

import pytest

from celery_dq.contrib.django.dashboard.quotas import Undo
from celery_dq.options import Quota
from tests.integration.shop import claim, dead_letter, send

KEY = "the key"


class Change(NamedTuple):
    """A change that a user asks for.

    Attributes:
        path: Its path below the dashboard.
        permission: The permission that it needs.
        fields: Fields of the form; ``{id}``, ``{key}``, ``{dead}`` stand for message, dedup key, dead letter;
            ``{undo}`` for the undo of the tenant's quota.
        asks: Whether a preview comes first.
    """

    path: str
    permission: str
    fields: dict[str, str]
    asks: bool


TENANT = {"queue": "push", "tenant": "a"}
MESSAGE, LETTER = {"queue": "push", "id": "{id}"}, {"queue": "push", "id": "{dead}"}
CHANGES = {
    "quota": Change("tenant/quota/", "change_quotas", {**TENANT, "rate": "7/s", "burst": "3"}, True),
    "quota removal": Change("tenant/quota/remove/", "change_quotas", TENANT, True),
    "pause": Change("tenant/pause/", "pause_tenants", TENANT, False),
    "resume": Change("tenant/resume/", "pause_tenants", TENANT, False),
    "queue pause": Change("queue/pause/", "pause_queues", {"queue": "push", "length": "1h"}, True),
    "quota undo": Change("tenant/quota/undo/", "change_quotas", {**TENANT, "undo": "{undo}"}, False),
    "queue resume": Change("queue/resume/", "pause_queues", {"queue": "push"}, False),
    "cancel": Change("message/cancel/", "cancel_messages", MESSAGE, True),
    "reschedule": Change("message/reschedule/", "edit_messages", {**MESSAGE, "due": "1h"}, False),
    "reprioritise": Change("message/reprioritise/", "edit_messages", {**MESSAGE, "priority": "9"}, False),
    "arguments": Change("message/arguments/edit/", "edit_messages", {**MESSAGE, "args": '["z"]'}, True),
    "move": Change("message/move/", "edit_messages", {**MESSAGE, "to": "mail"}, True),
    "letter edit": Change(
        "dead-letters/letter/edit/", "edit_dead_letters", {**LETTER, "priority": "9"}, True
    ),
    "replay": Change("dead-letters/replay/", "replay_dead_letters", LETTER, True),
    "replay steps": Change("dead-letters/replay/steps/", "replay_dead_letters", {"queue": "push"}, False),
    "purge": Change("dead-letters/purge/", "purge_dead_letters", {"queue": "push"}, True),
    "release": Change("dedup/release/", "release_dedup_locks", {**TENANT, "key": "{key}"}, True),
}
PERMISSIONS = {"view_queues", "view_arguments", *(each.permission for each in CHANGES.values())}


@pytest.fixture
def task(shop: Any) -> str:
    """A waiting message with a dedup lock; beside it a dead letter, a quota and a tenant that is paused."""
    dead_letter(shop, "dead")
    shop.dq.quotas.set("push", "a", rate="5/s")
    shop.dq.quotas.pause("push", "b")
    send(shop, "m", queue="mail")
    message = shop.tasks["notify"].apply_async(("a",), dedup={"key": KEY})
    return str(message.id)


def state_of(shop: Any) -> tuple[Any, ...]:
    queue = shop.dq.queues["push"].snapshot(ages=False)
    locks = [each.key for each in shop.dq.dedup["push"].list()]
    live, paused = shop.dq.quotas.live("push").tenants, sorted(shop.dq.quotas.paused("push"))
    pauses = (paused, queue.pause)
    priorities = [(each.priority, each.args) for each in shop.dq.queues["push"].peek()]
    return (
        priorities,
        queue.delayed,
        queue.waiting,
        queue.discards,
        queue.dead,
        locks,
        sorted(map(str, live.items())),
        pauses,
    )


def fields_of(shop: Any, change: Change, task: str) -> dict[str, str]:
    (lock,), (letter,) = shop.dq.dedup["push"].list(), shop.dq.dead_letters["push"].list()
    undo = Undo.of("push", "a", None, shop.dq.quotas.get("push", "a"))
    known = {"id": task, "key": lock.key, "dead": letter.id, "undo": undo}
    return {name: value.format(**known) for name, value in change.fields.items()}


def hidden_fields(page: str) -> dict[str, str]:
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page)
    return {name: unescape(value) for name, value in found if name != "csrfmiddlewaretoken"}


def make(client: Any, change: Change, fields: dict[str, str]) -> Any:
    """Ask for a change and confirm it; return the last answer."""
    answer = client.post(f"/dq/{change.path}", fields)
    if not change.asks or answer.status_code != 200:
        return answer
    return client.post(f"/dq/{change.path}", hidden_fields(answer.content.decode()))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_needs_its_permission_and_only_that(shop: Any, login: Any, task: str, name: str) -> None:
    change = CHANGES[name]
    fields = fields_of(shop, change, task)
    before = state_of(shop)
    all_others = login(*(each for each in PERMISSIONS if each != change.permission))
    for refused in (all_others, login()):
        for confirmed in ({}, {"confirmed": "1"}):
            answer = refused.post(f"/dq/{change.path}", {**fields, **confirmed})
            assert answer.status_code == 403
            assert "Not allowed" in answer.content.decode()
            assert f"celery_dq.{change.permission}" in answer.content.decode()
    assert state_of(shop) == before
    if name == "resume":
        shop.dq.quotas.pause("push", "a")
    if name == "queue resume":
        shop.dq.queues["push"].pause()
    before = state_of(shop)
    assert make(login(change.permission), change, fields).status_code == 403
    answer = make(login("view_queues", change.permission), change, fields)
    assert answer.status_code == (200 if name == "replay steps" else 302), answer.content.decode()
    assert state_of(shop) != before


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_needs_the_csrf_token(shop: Any, login: Any, task: str, name: str) -> None:
    change = CHANGES[name]
    before = state_of(shop)
    answer = login("all", csrf=True).post(
        f"/dq/{change.path}", {**fields_of(shop, change, task), "confirmed": "1"}
    )
    assert answer.status_code == 403
    assert "CSRF" in answer.content.decode()
    assert state_of(shop) == before


@pytest.mark.parametrize("name", CHANGES)
def test_a_read_only_dashboard_changes_nothing(
    use_app: Any, redis_url: str, operator: Any, name: str
) -> None:
    shop = use_app(redis_url.replace("redis://", "dq-redis://", 1), dq_web_read_only=True)
    change = CHANGES[name]
    answer = operator.post(f"/dq/{change.path}", {**TENANT, "id": "x", "confirmed": "1"})
    assert answer.status_code == 405
    assert "--allow-changes" in answer.content.decode()
    assert shop.dq.queues["push"].snapshot().waiting == 0


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_no_get(shop: Any, operator: Any, name: str) -> None:
    assert operator.get(f"/dq/{CHANGES[name].path}", CHANGES[name].fields).status_code == 405


def test_a_user_sees_the_buttons_of_his_permissions_only(shop: Any, login: Any, task: str) -> None:
    viewer, (letter,) = login("view_queues"), shop.dq.dead_letters["push"].list()
    shop.dq.queues["mail"].pause()
    for path in (
        *("tenant/?queue=push&tenant=a", "tenant/?queue=push&tenant=b", "queue/?queue=push"),
        *("queue/?queue=mail", f"message/?id={task}", f"message/arguments/?queue=push&id={task}"),
        *("dead-letters/?queue=push", f"dead-letters/letter/?queue=push&id={letter.id}"),
        *(f"message/?id={letter.id}", "dedup/?queue=push"),
    ):
        page = viewer.get(f"/dq/{path}").content.decode()
        assert "<button>" not in page.replace("<button>Filter", "")
        assert 'class="danger' not in page
    assert (
        "Cancel…" in login("view_queues", "cancel_messages").get(f"/dq/message/?id={task}").content.decode()
    )


def test_a_paused_queue_shows_on_every_page_and_is_resumed(shop: Any, operator: Any, task: str) -> None:
    queue = {"queue": "push"}
    asked = operator.post("/dq/queue/pause/", {**queue, "length": "15m"}).content.decode()
    assert shop.dq.queues["push"].snapshot().pause is None
    page = operator.post("/dq/queue/pause/", hidden_fields(asked), follow=True).content.decode()
    pause = shop.dq.queues["push"].snapshot().pause
    assert pause.until - pause.since == timedelta(minutes=15)
    assert "Resume the queue" in page
    assert f"{pause.until:%Y-%m-%d %H:%M:%S}" in page
    assert "queue paused" in page
    assert 'class="chip paused">paused<' in operator.get("/dq/").content.decode()
    assert "queue paused" in operator.get("/dq/tenant/", TENANT).content.decode()
    assert operator.post("/dq/queue/pause/", {**queue, "length": "1y"}).status_code == 400
    page = operator.post("/dq/queue/resume/", queue, follow=True).content.decode()
    assert "is resumed" in page
    assert "queue paused" not in page
    operator.post("/dq/tenant/pause/", {**TENANT, "length": "1h"})
    pause = shop.dq.quotas.paused("push")["a"]
    assert pause.until - pause.since == timedelta(hours=1)


def test_a_quota_is_changed_after_a_preview_of_the_differences(shop: Any, operator: Any, task: str) -> None:
    change = CHANGES["quota"]
    asked = operator.post("/dq/tenant/quota/", {**change.fields, "weight": "2.5", "concurrency": ""})
    text = re.sub(r"<[^>]+>|\s+", " ", asked.content.decode())
    assert " ".join(text.split()).count("rate 5/s 7/s") == 1
    assert "burst" in text
    assert shop.dq.quotas.get("push", "a").rate == 5
    done = operator.post("/dq/tenant/quota/", hidden_fields(asked.content.decode()), follow=True)
    assert "is rate=7/s burst=3 weight=2.5 concurrency=unlimited now" in done.content.decode()
    quota = shop.dq.quotas.get("push", "a")
    assert (quota.rate, quota.burst, quota.weight, quota.concurrency) == (7, 3, 2.5, None)


def test_a_bound_of_the_backlog_is_set_changed_and_removed_in_the_form(shop: Any, operator: Any) -> None:
    def post(**fields: str) -> tuple[str, Any]:
        """Change the quota after a preview; return the text of the preview and the quota."""
        asked = operator.post("/dq/tenant/quota/", {**TENANT, **fields}).content.decode()
        done = operator.post("/dq/tenant/quota/", hidden_fields(asked), follow=True)
        assert done.status_code == 200, done.content.decode()
        return " ".join(re.sub(r"<[^>]+>|\s+", " ", asked).split()), shop.dq.quotas.get("push", "a")

    text, quota = post(max_waiting="500", when_full="discard")
    assert "max_waiting unlimited 500" in text
    assert "when_full refuse discard" in text
    assert quota == Quota(max_waiting=500, when_full="discard")
    page = operator.get("/dq/tenant/", TENANT).content.decode()
    assert 'name="max_waiting" value="500"' in page
    assert "<option selected>discard</option>" in page
    # An emptied field removes the bound, whatever the choice beside it is.
    text, quota = post(max_waiting="", when_full="discard")
    assert "max_waiting 500 unlimited" in text
    assert "when_full" not in text.partition("max_waiting 500")[2]
    assert quota == Quota(when_full="discard")
    _, quota = post(rate="5", when_full="refuse")
    assert quota == Quota(rate=5)


def test_a_small_change_of_a_quota_is_neither_hidden_nor_overwritten(shop: Any, operator: Any) -> None:
    shop.dq.quotas.set("push", "a", rate="1000/s", burst=999_998)
    fields = {**TENANT, "rate": "1000/s", "burst": "999998.4", "weight": "1"}
    asked = operator.post("/dq/tenant/quota/", fields).content.decode()
    assert "<bdi>999998</bdi>" in asked
    assert "<bdi>999998.4</bdi>" in asked
    shop.dq.quotas.set("push", "a", burst=999_998.1)
    assert operator.post("/dq/tenant/quota/", hidden_fields(asked)).status_code == 400
    shop.dq.quotas.set("push", "a", rate=0.123456789, burst=1)
    page = operator.get("/dq/tenant/", TENANT).content.decode()
    (rate,) = re.findall(r'name="rate" value="([^"]*)"', page)
    same = operator.post("/dq/tenant/quota/", {**TENANT, "rate": rate, "burst": "1", "weight": "1"})
    assert "has these values already" in same.content.decode()


def test_a_quota_that_has_changed_since_the_preview_stays(shop: Any, operator: Any, task: str) -> None:
    asked = operator.post("/dq/tenant/quota/", CHANGES["quota"].fields)
    shop.dq.quotas.set("push", "a", rate="99/s")
    answer = operator.post("/dq/tenant/quota/", hidden_fields(asked.content.decode()))
    assert (answer.status_code, shop.dq.quotas.get("push", "a").rate) == (400, 99)
    assert "has changed since the preview" in answer.content.decode()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rate": "fast"}, "is not a rate"),
        ({"rate": "", "burst": "4"}, "has no effect without a rate"),
        ({"rate": "5", "burst": "x"}, "burst = &#x27;x&#x27;"),
        ({"rate": "5", "concurrency": "1.5"}, "is not a whole number"),
        ({"rate": "5", "weight": "-1"}, "weight = -1"),
        ({"rate": "5", "max_waiting": "few"}, "max_waiting = &#x27;few&#x27; is not a whole number"),
        ({"rate": "5", "max_waiting": "0"}, "max_waiting = 0 is not from 1 to 1000000000"),
        ({"rate": "5", "when_full": "wait"}, "has no effect without max_waiting"),
        (
            {"rate": "5", "max_waiting": "5", "when_full": "drop"},
            "when_full = &#x27;drop&#x27; is not one of",
        ),
        ({"rate": "5/s"}, "has these values already"),
        ({"rate": "9" * 5_000 + "/s"}, "give a shorter number"),
    ],
)
def test_an_impossible_quota_is_refused_with_the_reason(
    shop: Any, operator: Any, task: str, fields: dict[str, str], reason: str
) -> None:
    for confirmed in ({}, {"confirmed": "1"}):
        answer = operator.post("/dq/tenant/quota/", {**TENANT, **fields, **confirmed})
        if not confirmed or "already" not in reason:
            assert answer.status_code == 400
            assert reason in answer.content.decode()
    assert shop.dq.quotas.get("push", "a").rate == 5


def test_chosen_dead_letters_are_sent_again_and_others_stay(shop: Any, operator: Any) -> None:
    ids = [dead_letter(shop, "a") for _ in range(3)]
    asked = operator.post("/dq/dead-letters/replay/", {"queue": "push", "id": ids[:2]})
    fields = hidden_fields(asked.content.decode())
    assert sorted(json.loads(fields["ids"])) == sorted(ids[:2])
    assert "2 of 3 dead letters" in asked.content.decode()
    later = dead_letter(shop, "a")
    done = operator.post("/dq/dead-letters/replay/", fields, follow=True)
    assert "2 of 2 dead letters" in done.content.decode()
    assert {letter.id for letter in shop.dq.dead_letters["push"].list()} == {ids[2], later}


def test_a_second_dead_letter_of_a_task_is_deleted_beside_a_waiting_message(shop: Any, operator: Any) -> None:
    notify = shop.tasks["notify"]
    for _ in range(2):
        notify.apply_async(("a",), task_id="twice~0")
    entries = claim(shop, want=2)
    with shop.dq._broker.open_home("push") as (partition, client):
        for entry in entries:
            partition.dead_letter("worker:1", entry.tag, reason="rejected", worker="w").run(client)
    notify.apply_async(("a",), task_id="twice~0")
    page = operator.get("/dq/dead-letters/", {"queue": "push"}).content.decode()
    ids = re.findall(r'name="id" value="([^"]*)"', page)
    assert sorted(ids) == ["twice~~0", "twice~~0~1"]
    for letter_id in ids:
        asked = operator.post("/dq/dead-letters/purge/", {"queue": "push", "id": letter_id})
        assert json.loads(hidden_fields(asked.content.decode())["ids"]) == [letter_id]
        operator.post("/dq/dead-letters/purge/", hidden_fields(asked.content.decode()))
    assert len(shop.dq.dead_letters["push"]) == 0


def test_a_chosen_dead_letter_that_cannot_be_read_stops_no_other(shop: Any, operator: Any) -> None:
    ids = [dead_letter(shop, "a") for _ in range(3)]
    with shop.dq._broker.open_home("push") as (partition, client):
        client.hset(partition.keys.dead, ids[0], b"?")
    asked = operator.post("/dq/dead-letters/replay/", {"queue": "push", "id": ids}).content.decode()
    done = operator.post("/dq/dead-letters/replay/", hidden_fields(asked), follow=True).content.decode()
    assert "2 of 3 dead letters of &#x27;push&#x27; were sent again." in done
    assert f"Dead letter &#x27;{ids[0]}&#x27; of &#x27;push&#x27; cannot be read" in done
    assert [letter.id for letter in shop.dq.dead_letters["push"].list()] == ids[:1]


def test_dead_letters_that_match_the_filter_are_deleted_as_previewed(shop: Any, operator: Any) -> None:
    ids = [dead_letter(shop, merchant) for merchant in ("a", "b", "a")]
    asked = operator.post("/dq/dead-letters/purge/", {"queue": "push", "tenant": "a"})
    assert "2 of 3 dead letters" in asked.content.decode()
    later = dead_letter(shop, "a")
    operator.post("/dq/dead-letters/purge/", hidden_fields(asked.content.decode()))
    assert {letter.id for letter in shop.dq.dead_letters["push"].list()} == {ids[1], later}
    assert operator.post("/dq/dead-letters/purge/", {"queue": "push", "tenant": "c"}).status_code == 400
    for ids_of_form in ('"all"', "[" * 100_000):
        wrong = {"queue": "push", "confirmed": "1", "ids": ids_of_form}
        answer = operator.post("/dq/dead-letters/purge/", wrong)
        assert answer.status_code == 400
        assert 'href="/dq/dead-letters/?queue=push">Go back' in answer.content.decode()
    assert len(shop.dq.dead_letters["push"]) == 2


def test_a_claimed_task_is_not_cancelled_and_the_page_reports_it(shop: Any, operator: Any) -> None:
    (task_id,) = send(shop, "a")
    claim(shop)
    fields = {"queue": "push", "id": task_id, "confirmed": "1"}
    done = operator.post("/dq/message/cancel/", fields, follow=True)
    assert "was not cancelled, because a worker has it" in done.content.decode()


def test_a_change_is_visible_at_once_and_logged(
    shop: Any, operator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    send(shop, "a")
    assert "Pause the tenant" in operator.get("/dq/tenant/", TENANT).content.decode()
    with caplog.at_level(logging.INFO, logger="celery_dq"):
        page = operator.post("/dq/tenant/pause/", TENANT, follow=True).content.decode()
    assert "Resume the tenant" in page
    assert "is paused in &#x27;push&#x27;" in page
    (record,) = [each for each in caplog.records if getattr(each, "event", "") == "dashboard_change"]
    assert (vars(record)["queue"], vars(record)["tenant"], vars(record)["change"]) == (
        "push",
        "a",
        "pause_tenants",
    )
    assert record.getMessage().startswith("user-")
    (entry,) = shop.dq.audit(queue="push")
    assert (entry.door, entry.by, entry.action) == ("dashboard", vars(record)["user"], "paused")


def test_a_notice_is_shown_only_if_the_dashboard_wrote_it(shop: Any, operator: Any) -> None:
    page = operator.get("/dq/", {"notice": "Call 555-1234 to unlock"}).content.decode()
    assert "555-1234" not in page.split("<footer>")[0]
