"""Headers, escaping, hidden arguments, and users without permissions."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.integration.shop import claim, dead_letter, send

SCRIPT = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
PAGES = (
    *("", "queue/?queue=push", "tenant/?queue=push&tenant=a", "message/?id=nowhere", "dead-letters/"),
    *("dead-letters/?queue=push", "dedup/", "dedup/?queue=push", "leaders/", "workers/", "audit/"),
)
#: Failures, which have the same headers.
FAILURES = (
    *("queue/", "?page=x", f"?page={'9' * 5_000}", "dead-letters/?queue=push&since=3650000d"),
    *("tenant/?queue=push&tenant=%00", "message/?id="),
)


@pytest.mark.parametrize("path", [*PAGES, *FAILURES])
def test_every_page_has_a_strict_policy_and_keeps_to_it(shop: Any, operator: Any, path: str) -> None:
    answer = operator.get(f"/dq/{path}")
    policy = answer["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "style-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer["Cache-Control"] == "no-store"
    assert answer["X-Content-Type-Options"] == "nosniff"
    text = answer.content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?! src=)", text)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    assert (answer.status_code == 200) == (path in PAGES)


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_json_too(shop: Any, operator: Any, path: str) -> None:
    answer = operator.get(f"/dq/{path}{'&' if '?' in path else '?'}format=json")
    assert json.loads(answer.content)["version"] == 1
    assert "Content-Security-Policy" in answer


@pytest.mark.parametrize("path", PAGES)
def test_a_page_needs_its_permission(shop: Any, login: Any, path: str) -> None:
    from django.test import Client

    refused = login(*("change_quotas", "purge_dead_letters")).get(f"/dq/{path}")
    assert refused.status_code == 403
    assert "Content-Security-Policy" in refused
    for chrome in ("online", "<nav", "All queues"):
        assert chrome not in refused.content.decode()
    stranger = Client().get(f"/dq/{path}")
    assert (stranger.status_code, stranger["Location"].partition("?")[0]) == (302, "/login/")
    assert Client().get(f"/dq/{path}{'&' if '?' in path else '?'}format=json").status_code == 403


def test_a_change_without_login_leads_to_the_login_and_then_to_the_page_of_the_form(shop: Any) -> None:
    from django.test import Client

    answer = Client().post("/dq/tenant/pause/", {"queue": "push", "tenant": "a"})
    assert (answer.status_code, answer["Location"]) == (
        302,
        "/login/?next=/dq/tenant/%3Fqueue%3Dpush%26tenant%3Da",
    )
    assert Client().post("/dq/tenant/pause/?format=json", {"queue": "push"}).status_code == 403


def test_names_are_escaped_everywhere(shop: Any, operator: Any) -> None:
    def run(order: Any) -> None: ...

    shop.task(name=SCRIPT, shared=False)(run)
    for _ in range(3):
        shop.tasks[SCRIPT].apply_async((SCRIPT,), tenant=SCRIPT, queue=SCRIPT)
    waiting = shop.tasks[SCRIPT].apply_async((1,), tenant=SCRIPT, queue=SCRIPT, dedup={"key": SCRIPT}).id
    (entry,) = claim(shop, queue=SCRIPT)
    with shop.dq._broker.open_home(SCRIPT) as (partition, client):
        partition.dead_letter("worker:1", entry.tag, reason=SCRIPT, worker=SCRIPT).run(client)
    pages = [
        ("", {}),
        ("", {"q": SCRIPT}),
        ("queue/", {"queue": SCRIPT, "q": SCRIPT}),
        ("tenant/", {"queue": SCRIPT, "tenant": SCRIPT}),
        ("message/", {"id": waiting}),
        ("message/", {"id": entry.tag[0]}),
        ("message/", {"id": SCRIPT}),
        ("dead-letters/", {}),
        ("dead-letters/", {"queue": SCRIPT, "tenant": SCRIPT, "reason": SCRIPT}),
        ("dedup/", {"queue": SCRIPT}),
        ("workers/", {}),
        ("audit/", {"queue": SCRIPT}),
        ("queue/", {"queue": "push", "state": SCRIPT}),
    ]
    for path, query in pages:
        text = operator.get(f"/dq/{path}", query).content.decode()
        assert "<script>alert" not in text, path
        assert "<img" not in text, path
        assert "alert(1)" in text, path
    # The previews of changes show names as well.
    key = shop.dq.dedup[SCRIPT].list()[0].key
    fields = {"queue": SCRIPT, "tenant": SCRIPT, "id": waiting, "key": key, "rate": "3"}
    for path in ("tenant/quota/", "message/cancel/", "dedup/release/", "dead-letters/purge/"):
        given = {"queue": SCRIPT} if path.startswith("dead") else fields
        text = operator.post(f"/dq/{path}", given).content.decode()
        assert "<script>alert" not in text, path
        assert "alert(1)" in text, path


def test_a_name_that_is_not_unicode_hides_no_other_queue(
    shop: Any, operator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    send(shop, "a")
    with shop.dq._broker.open_home("push") as (partition, client):
        client.sadd(shop.dq._broker._registry, b"bad\xffname")
        client.zadd(partition.keys.turn, {b"bad\xfftenant": 1})
    for path in ("", "workers/", "dedup/", "message/?id=x"):
        assert operator.get(f"/dq/{path}").status_code == 200, path
    rows = json.loads(operator.get("/dq/?format=json").content)["queues"]
    assert [row["queue"]["name"] for row in rows] == ["push"]
    records = [each for each in caplog.records if getattr(each, "event", "") == "queue_name_unreadable"]
    assert len(records) == 1
    answer = operator.get("/dq/queue/?queue=push")
    assert answer.status_code == 503
    assert "A stored name is not valid Unicode" in answer.content.decode()


@pytest.fixture
def secrets(use_app: Any, redis_url: str) -> Any:
    """A function that makes an app, with a waiting, a delayed and a dead message that hold a secret."""

    def secrets(**settings: Any) -> list[str]:
        shop = use_app(redis_url.replace("redis://", "dq-redis://", 1), **settings)
        dead_letter(shop, "s3cret")
        (entry,) = (send(shop, "s3cret"), claim(shop))[1]
        with shop.dq._broker.open_home("push", "s3cret") as (partition, client):
            reason = "failed: ValueError: no account s3cret"
            partition.dead_letter("worker:1", entry.tag, reason=reason, worker="w").run(client)
        options = {"kwargs": {"order": "s3cret"}, "headers": {"x-token": "s3cret"}, "tenant": "a"}
        now, later = (
            shop.tasks["notify"].apply_async(("s3cret",), countdown=wait, **options) for wait in (0, 99)
        )
        return [now.id, later.id, shop.dq.dead_letters["push"].list()[0].id]

    return secrets


def texts(client: Any, ids: list[str]) -> str:
    """Everything that the pages show about messages, as HTML and as JSON."""
    paths = ["queue/?queue=push", "tenant/?queue=push&tenant=a", "dead-letters/?queue=push&tenant="]
    paths += [f"message/?id={each}" for each in ids]
    pages = [client.get(f"/dq/{path}{form}") for path in paths for form in ("", "&format=json")]
    assert {page.status_code for page in pages} == {200}
    # The tenant of the dead letter is its first argument.
    return "".join(re.sub(r"tenant[^,]{0,60}s3cret|<bdi>s3cret", "", page.content.decode()) for page in pages)


def test_arguments_and_unknown_headers_are_hidden(secrets: Any, operator: Any) -> None:
    ids = secrets()
    text = texts(operator, ids)
    assert "s3cret" not in text
    assert "(hidden)" in text
    assert "x-token" in text
    assert "failed: ValueError" in text
    # The filter tells nothing that the page hides.
    query = {"queue": "push", "reason": "s3cret", "format": "json"}
    assert json.loads(operator.get("/dq/dead-letters/", query).content)["letters"] == []
    assert operator.post("/dq/dead-letters/purge/", query).status_code == 400


def test_arguments_are_shown_by_the_setting_to_users_with_the_permission(secrets: Any, login: Any) -> None:
    ids = secrets(dq_web_show_arguments=True)
    assert "s3cret" not in texts(login("view_queues"), ids)
    shown = texts(login("view_queues", "view_arguments"), ids)
    assert "s3cret" in shown
    assert "(hidden)" not in shown
    # A page of another user, who may see them, is not shared.
    assert "s3cret" not in texts(login("view_queues"), ids)


def test_assets_are_served_and_nothing_else(shop: Any, operator: Any) -> None:
    from django.test import Client

    page = operator.get("/dq/").content.decode()
    for name, kind in (
        ("dashboard.css", "text/css"),
        ("dashboard.js", "text/javascript"),
        ("shortcuts.js", "text/javascript"),
    ):
        (address,) = re.findall(rf'"(/dq/assets/{name}\?v=[0-9a-f]{{8}})"', page)
        answer = Client().get(address)
        assert (answer.status_code, answer["Content-Type"]) == (200, f"{kind}; charset=utf-8")
        assert answer.content
    assert Client().get("/dq/assets/views.py").status_code == 404
    assert Client().get("/dq/assets/..%2fconf.py").status_code == 404
