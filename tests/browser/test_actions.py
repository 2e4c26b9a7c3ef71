"""Every action of the dashboard once, by a real browser. `tests.dashboard.test_changes` has the refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Look
from tests.integration.shop import dead_letter, send

TENANT = "tenant/?queue=push&tenant=a"


@dataclass(frozen=True)
class Action:
    """A user's way through the pages to a change.

    Attributes:
        path: The page that has the form; ``{task}`` and ``{dead}`` are the ids of messages.
        permission: The permission that it needs.
        button: Text of the button on the page.
        confirm: Text of the button on the preview; "" for a change that is made at once.
        audited: Action of the entry in the audit stream.
        form: Values of the form by label.
        chosen: Values of the form's lists by label.
    """

    path: str
    permission: str
    button: str
    confirm: str
    audited: str
    form: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)


ACTIONS = {
    "quota": Action(
        TENANT, "change_quotas", "Preview the change", "Change the quota", "quota_set", {"Rate": "7/s"}
    ),
    "quota removal": Action(
        TENANT, "change_quotas", "Remove its own quota…", "Remove the quota", "quota_removed"
    ),
    "pause": Action(
        TENANT, "pause_tenants", "Pause the tenant", "", "paused", chosen={"Length of the pause": "1h"}
    ),
    "resume": Action("tenant/?queue=push&tenant=b", "pause_tenants", "Resume the tenant", "", "resumed"),
    "queue pause": Action(
        "queue/?queue=push", "pause_queues", "Pause the queue…", "Pause the queue", "paused"
    ),
    "queue resume": Action("queue/?queue=mail", "pause_queues", "Resume the queue", "", "resumed"),
    "cancel": Action("message/?id={task}", "cancel_messages", "Cancel…", "Cancel the task", "cancelled"),
    "reschedule": Action(
        "message/?id={task}", "edit_messages", "Reschedule", "", "rescheduled", {"Due": "1h"}
    ),
    "reprioritise": Action(
        "message/?id={task}",
        "edit_messages",
        "Reprioritise",
        "",
        "reprioritised",
        chosen={"New priority": "7"},
    ),
    "arguments": Action(
        "message/arguments/?queue=push&id={task}",
        "edit_messages",
        "Preview the change",
        "Change the arguments",
        "edited",
        {"Named arguments": '{"order": 7}'},
    ),
    "move": Action(
        "message/?id={task}", "edit_messages", "Move…", "Move the task", "moved", {"Move to queue": "mail"}
    ),
    "edit": Action(
        "dead-letters/letter/?queue=push&id={dead}",
        "edit_dead_letters",
        "Preview the change",
        "Change and send",
        "dead_edited",
        {"Tenant": "z"},
        {"Priority": "7"},
    ),
    "replay one": Action(
        "message/?id={dead}", "replay_dead_letters", "Send again…", "Send 1 again", "dead_replayed"
    ),
    "purge": Action("dead-letters/?queue=push", "purge_dead_letters", "Delete…", "Delete 1", "dead_purged"),
    "release": Action(
        "dedup/?queue=push", "release_dedup_locks", "Release…", "Release the lock", "dedup_evicted"
    ),
}


@pytest.fixture
def ids(shop: Any) -> dict[str, str]:
    """A waiting task with a dedup lock, a dead letter, and everything else that the actions change."""
    dead = dead_letter(shop, "dead")
    shop.dq.quotas.set("push", "a", rate="5/s")
    shop.dq.quotas.pause("push", "b")
    send(shop, "m", queue="mail")
    shop.dq.queues["mail"].pause()
    task = shop.tasks["notify"].apply_async(("a",), dedup={"key": "order 7"}).id
    return {"task": str(task), "dead": dead}


def press(page: Page, text: str) -> None:
    with page.expect_navigation():
        page.get_by_role("button", name=text, exact=True).first.click()


@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_has_its_effect(shop: Any, ids: dict[str, str], look: Look, name: str) -> None:
    from django.contrib.auth.models import User

    action = ACTIONS[name]
    with look("view_queues", action.permission) as window:
        page, before = window.page, len(shop.dq.audit())
        page.goto(action.path.format(**ids))
        for label, value in action.form.items():
            page.get_by_label(label).fill(value)
        for label, value in action.chosen.items():
            page.get_by_label(label).select_option(value)
        press(page, action.button)
        if action.confirm:
            assert len(shop.dq.audit()) == before
            press(page, action.confirm)
        expect(page.locator(".notice")).to_be_visible()
        entry = shop.dq.audit()[0]
        (user,) = User.objects.all()
        assert (entry.action, entry.door, entry.by) == (action.audited, "dashboard", user.get_username())
        assert window.problems == []


def test_a_replay_by_filter_shows_its_progress_and_stops(shop: Any, look: Look) -> None:
    for _ in range(6):
        dead_letter(shop, "a")
    dead = shop.dq.dead_letters["push"]
    with look("view_queues", "replay_dead_letters") as window:
        page = window.page
        page.goto("dead-letters/?queue=push&tenant=a")
        press(page, "Send again…")
        page.get_by_label("At most").fill("1/m")
        press(page, "Send them again")
        expect(page.get_by_role("status")).to_contain_text("1 sent")
        page.get_by_role("link", name="Stop").click()
        expect(page.get_by_role("heading", name="5 dead letters")).to_be_visible()
        assert len(dead) == 5
        press(page, "Send again…")
        # Four messages are one step, and the page asks for the second one by itself.
        page.get_by_label("At most").fill("2")
        press(page, "Send them again")
        expect(page.get_by_role("heading", name="5 dead letters sent again")).to_be_visible()
        assert len(dead) == 0
        assert window.problems == []


def test_a_change_of_a_quota_has_a_reason_and_is_undone(shop: Any, look: Look) -> None:
    quotas = shop.dq.quotas
    quotas.set("push", "a", rate="5/s", burst=3)
    with look("view_queues", "change_quotas") as window:
        page = window.page
        page.goto(TENANT)
        page.get_by_label("Rate").fill("7/s")
        press(page, "Preview the change")
        page.get_by_label("Reason").fill("ticket 12")
        press(page, "Change the quota")
        assert quotas.get("push", "a").rate == 7
        assert shop.dq.audit()[0].details.endswith("; reason: ticket 12")
        page.reload()
        press(page, "Undo the last change")
        expect(page.locator(".notice")).to_contain_text("The change is undone")
        assert (quotas.get("push", "a").rate, quotas.get("push", "a").burst) == (5, 3)
        expect(page.get_by_role("button", name="Undo the last change")).to_have_count(0)
        page.goto("audit/?queue=push")
        expect(page.get_by_text("reason: ticket 12")).to_be_visible()
        assert window.problems == []
