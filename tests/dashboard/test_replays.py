"""The replay of the dead letters that match a filter, step by step."""

from __future__ import annotations

import re
from typing import Any

import pytest

from celery_dq.errors import InvalidRequest
from tests.dashboard.test_changes import hidden_fields
from tests.integration.shop import dead_letter

STEPS = "/dq/dead-letters/replay/steps/"


def ask(client: Any, **wanted: str) -> tuple[str, dict[str, str]]:
    """Ask for a replay; return the text of the preview and the fields of its form."""
    page = client.post("/dq/dead-letters/replay/", {"queue": "push", **wanted}).content.decode()
    return page, hidden_fields(page)


def tenants(shop: Any) -> list[str]:
    return sorted(letter.tenant for letter in shop.dq.dead_letters["push"].list())


def test_a_replay_by_filter_goes_on_until_all_are_sent_at_its_rate(shop: Any, operator: Any) -> None:
    for tenant in "abaa":
        dead_letter(shop, tenant)
    page, fields = ask(operator, tenant="a")
    assert "Send 3 dead letters again?" in page
    assert "3 of 4 dead letters" in page
    assert len(shop.dq.dead_letters["push"]) == 4
    dead_letter(shop, "a")  # later than the preview
    fields["rate"] = "54/m"
    for sent in (1, 2, 3):
        page = operator.post(STEPS, fields).content.decode()
        fields = hidden_fields(page)
        assert f"{sent} sent" in page
        assert 'data-wait-ms="1111"' in page
        assert shop.dq.queues["push"].depth == sent
    page = operator.post(STEPS, fields).content.decode()
    assert "3 dead letters sent again" in page
    assert "data-wait-ms" not in page
    assert tenants(shop) == ["a", "b"]
    entries = shop.dq.audit(queue="push")
    assert [(each.action, each.tenant, each.count) for each in entries] == [("dead_replayed", "a", 1)] * 3


def test_a_replay_by_filter_can_be_as_fast_as_possible(shop: Any, operator: Any) -> None:
    for tenant in "aab":
        dead_letter(shop, tenant)
    _, fields = ask(operator)
    assert "3 dead letters sent again" in operator.post(STEPS, fields).content.decode()
    assert tenants(shop) == []
    assert operator.post("/dq/dead-letters/replay/", {"queue": "push"}).status_code == 400


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"rate": "fast"}, "rate = &#x27;fast&#x27; is not a rate"),
        ({"rate": "0"}, "leave it empty"),
        ({"after": "x"}, "is no cursor"),
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
    with pytest.raises(InvalidRequest, match="is no cursor"):
        dead.replay_part(lambda letter: True, "1.2")
