"""The replay of the dead letters that match a filter, step by step."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

import pytest

from celery_dq.contrib.django.dashboard import dead_letters
from celery_dq.errors import InvalidRequest
from tests.dashboard.test_changes import hidden_fields
from tests.integration.shop import dead_letter

FILTER = ("queue", "tenant", "task", "reason", "since", "until")
STEPS = "/dq/dead-letters/replay/steps/"


def ask(client: Any, **wanted: str) -> tuple[str, dict[str, str]]:
    page = client.post("/dq/dead-letters/replay/", {"queue": "push", **wanted}).content.decode()
    return page, hidden_fields(page)


def tenants(shop: Any) -> list[str]:
    return sorted(letter.tenant for letter in shop.dq.dead_letters["push"].list())


def entries(shop: Any) -> list[tuple[str, str, int]]:
    found = shop.dq.audit(queue="push")
    return [(each.tenant, each.details, each.count) for each in found if each.action == "dead_replayed"]


def test_a_replay_by_filter_goes_on_until_all_are_sent_at_its_rate(shop: Any, operator: Any) -> None:
    for tenant in "abaa":
        dead_letter(shop, tenant)
    page, fields = ask(operator, tenant="a")
    assert "Send 3 dead letters again?" in page
    assert "3 of 4 dead letters" in page
    assert len(shop.dq.dead_letters["push"]) == 4
    dead_letter(shop, "a")  # later than the preview
    until = fields["until"].replace("T", " ")[:19]
    fields["rate"] = "54/m"
    for sent in (1, 2, 3):
        page = operator.post(STEPS, fields).content.decode()
        fields = hidden_fields(page)
        assert f"{sent} sent" in page
        assert 'data-wait-ms="1111"' in page
        assert shop.dq.queues["push"].depth == sent
        # One entry for all steps: a replay that stops here has it, too.
        assert entries(shop) == [("a", f"until {until}; unfinished", sent)]
    page = operator.post(STEPS, fields).content.decode()
    assert "3 dead letters sent again" in page
    assert "data-wait-ms" not in page
    assert tenants(shop) == ["a", "b"]
    assert entries(shop) == [("a", f"until {until}", 3)]


def test_a_replay_by_filter_can_be_as_fast_as_possible(shop: Any, operator: Any) -> None:
    for tenant in "aab":
        dead_letter(shop, tenant)
    _, fields = ask(operator)
    assert "3 dead letters sent again" in operator.post(STEPS, fields).content.decode()
    assert tenants(shop) == []
    assert operator.post("/dq/dead-letters/replay/", {"queue": "push"}).status_code == 400


@pytest.mark.parametrize("change", ["replay", "purge"])
def test_dead_letters_that_a_page_shows_are_found_by_its_form(
    shop: Any, operator: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(dead_letters, "MOST_LOOKS", 2)
    for tenant in "abaccbbbb":
        dead_letter(shop, tenant)
    path = f"/dq/dead-letters/{change}/"
    query = {"queue": "push", "tenant": "a", "after": "6"}
    page = operator.get("/dq/dead-letters/", query).content.decode()
    assert re.findall(r'data-label="tenant"><bdi>(\w)<', page) == ["a"]
    form = {name: value for name, value in hidden_fields(page).items() if name in ("after", *FILTER)}
    # The page and its form look at two dead letters each; older ones match as well.
    asked = operator.post(path, form).content.decode()
    assert ("At least 1 of 9" if change == "replay" else "1 of 9 dead letters") in asked
    operator.post(STEPS if change == "replay" else path, hidden_fields(asked))
    assert "".join(tenants(shop)) == ("bbbbbcc" if change == "replay" else "abbbbbcc")
    answer = operator.post(path, {**form, "tenant": "c", "after": "0"})
    assert answer.status_code == 400
    assert "none of the 4 dead letters" in answer.content.decode()
    answer = operator.post(path, {**form, "tenant": "z", "after": "8"}).content.decode()
    assert "no dead letter of &#x27;push&#x27; matches" in answer


def test_a_filter_by_reason_holds_beside_the_reason_for_the_audit_trail(shop: Any, operator: Any) -> None:
    dead_letter(shop, "a")
    dead_letter(shop, "b", reason="TimeoutError")
    page, _ = ask(operator, reason="timeout")
    # All fields of the form, as a browser sends them.
    form = page[page.index('class="actions"') : page.index("</form>", page.index('class="actions"'))]
    inputs = [dict(re.findall(r'(\w+)="([^"]*)"', each)) for each in re.findall(r"<input [^>]*>", form)]
    sent = [(each["name"], each.get("value", "ticket 12")) for each in inputs if each["name"] != "rate"]
    operator.post(STEPS, urlencode(sent), content_type="application/x-www-form-urlencoded")
    assert tenants(shop) == ["a"]
    ((_, details, count),) = entries(shop)
    assert (details.split(", until")[0], details.endswith("; reason: ticket 12"), count) == (
        "reason timeout",
        True,
        1,
    )


def test_an_entry_of_another_user_or_another_change_is_never_replaced(shop: Any) -> None:
    dead, audit = shop.dq.dead_letters["push"], shop.dq.audit

    def step(by: str, described: str, continues: str) -> str:
        """Send one of two dead letters again; return the id of the audit entry."""
        for _ in range(2):
            dead_letter(shop, "a")
        with audit.through("dashboard", by=by):
            part = dead.replay_part(lambda _: True, limit=1, described=described, continues=continues)
        dead.purge()
        assert part.after
        return str(part.entry_id)

    first = step("anna", "x", "")
    for by, described in (("ben", "x"), ("anna", "y")):
        step(by, described, first)
    second = step("anna", "x", first)
    step("anna", "x", first)  # the page of an earlier step, sent again
    step("anna", "x", "9-9")
    step("anna", "x", second)
    found = [(each.by, each.details, each.count) for each in audit() if each.action == "dead_replayed"]
    assert found == [
        ("anna", "x; unfinished", 3),
        ("anna", "x; unfinished", 1),
        ("anna", "x; unfinished", 1),
        ("anna", "y; unfinished", 1),
        ("ben", "x; unfinished", 1),
    ]


def test_the_entry_of_an_interrupted_step_counts_the_former_ones(shop: Any) -> None:
    dead = shop.dq.dead_letters["push"]
    for _ in range(3):
        dead_letter(shop, "a")
    part = dead.replay_part(lambda _: True, limit=1)
    looks = [True]
    with pytest.raises(IndexError):
        dead.replay_part(lambda _: looks.pop(), part.after, limit=2, continues=part.entry_id)
    assert entries(shop) == [("", "interrupted; at least 2", 2)]


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"rate": "fast"}, "rate = &#x27;fast&#x27; is not a rate"),
        ({"rate": "0"}, "leave it empty"),
        ({"after": "x"}, "is not a cursor"),
        ({"audit_entry": "1-x"}, "is not an id of an audit entry"),
        ({"sent": "-1"}, "sent = &#x27;-1&#x27;"),
        ({"until": "2026-99-01"}, "give a time in UTC such as"),
        ({"since": "soon"}, "since = &#x27;soon&#x27;"),
    ],
)
def test_a_wrong_step_sends_nothing(shop: Any, operator: Any, field: dict[str, str], reason: str) -> None:
    dead_letter(shop, "a")
    answer = operator.post(STEPS, {"queue": "push", "confirmed": "1", **field})
    assert (answer.status_code, reason in answer.content.decode()) == (400, True), answer.content.decode()
    assert tenants(shop) == ["a"]


def test_dead_letters_are_filtered_by_both_ends_of_a_time(shop: Any, operator: Any) -> None:
    old, *_ = [dead_letter(shop, tenant) for tenant in "ab"]
    with shop.dq._broker.open_home("push") as (partition, client):
        client.zadd(partition.keys.dead_index, {old: 1e15})  # in 2001
    for query, found in (
        ({"until": "1h"}, ["a"]),
        ({"since": "2001-01-01", "until": "2002-01-01T00:00Z"}, ["a"]),
        ({"since": "1h"}, ["b"]),
    ):
        page = operator.get("/dq/dead-letters/", {"queue": "push", **query}).content.decode()
        assert re.findall(r'data-label="tenant"><bdi>(\w)<', page) == found, query
        _, fields = ask(operator, **query)
        assert fields["queue"] == "push"


def test_a_part_of_a_replay_begins_where_the_last_one_ended(shop: Any) -> None:
    dead = shop.dq.dead_letters["push"]
    ids = [dead_letter(shop, tenant, task_id=f"id-{place}") for place, tenant in enumerate("bcbaa")]
    with shop.dq._broker.open_home("push") as (partition, client):
        # All at the same time, as those that were reaped together.
        client.zadd(partition.keys.dead_index, dict.fromkeys(ids, 1e15))
        key = partition.keys.dead
        unreadable = next(letter.id for letter in dead.list() if letter.tenant == "c")
        client.hset(key, unreadable, b"?")
    after, sent, looked_at = "", 0, 0
    for _ in range(9):
        part = dead.replay_part(lambda letter: letter.tenant != "b", after, limit=1)
        after, sent, looked_at = part.after, sent + part.sent, looked_at + part.looked_at
        if not after:
            break
    # Each is looked at once, also those that stay.
    assert looked_at == 5
    assert (sent, tenants(shop)) == (2, ["b", "b", "c"])
    assert dead.replay_part(lambda letter: True, "7.0.0").after == ""
    with pytest.raises(InvalidRequest, match="is not a cursor"):
        dead.replay_part(lambda letter: True, "1.2")
