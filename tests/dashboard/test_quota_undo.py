"""The undo of a change of a quota, and the audit trail."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.core import signing

from celery_dq.contrib.django.dashboard.quotas import Undo
from celery_dq.errors import InvalidRequest
from tests.dashboard.test_changes import hidden_fields

TENANT = {"queue": "push", "tenant": "a"}


def undo_of(answer: Any) -> str:
    assert answer.status_code == 302, answer.content.decode()
    return str(parse_qs(urlsplit(answer["Location"]).query)["undo"][0])


def undo(client: Any, text: str, **fields: str) -> Any:
    return client.post("/dq/tenant/quota/undo/", {**TENANT, "undo": text, **fields}, follow=True)


def test_the_first_quota_of_a_tenant_is_undone_by_its_removal(shop: Any, operator: Any) -> None:
    shop.dq.quotas.set_default("push", rate="3/s")
    fields = {**TENANT, "rate": "7/s", "confirmed": "1"}
    text = undo_of(operator.post("/dq/tenant/quota/", fields))
    assert shop.dq.quotas.list("push").keys() == {"a"}
    page = operator.get("/dq/tenant/", {**TENANT, "undo": text}).content.decode()
    assert "Undo the last change" in page
    assert "The change is undone" in undo(operator, text).content.decode()
    assert shop.dq.quotas.list("push") == {}
    assert "Undo the last change" not in operator.get("/dq/tenant/", TENANT).content.decode()


def test_the_removal_of_a_quota_is_undone(shop: Any, operator: Any) -> None:
    parts = {"rate": "5/s", "burst": 2, "weight": 3, "concurrency": 4, "max_waiting": 5, "when_full": "wait"}
    quota = shop.dq.quotas.set("push", "a", **parts)
    text = undo_of(operator.post("/dq/tenant/quota/remove/", {**TENANT, "confirmed": "1"}))
    assert shop.dq.quotas.list("push") == {}
    undo(operator, text)
    assert shop.dq.quotas.get("push", "a") == quota


def test_a_quota_that_has_changed_again_stays(shop: Any, operator: Any) -> None:
    shop.dq.quotas.set("push", "a", rate="5/s")
    text = undo_of(operator.post("/dq/tenant/quota/", {**TENANT, "rate": "7/s", "confirmed": "1"}))
    shop.dq.quotas.set("push", "a", rate="9/s")
    answer = undo(operator, text)
    assert (answer.status_code, shop.dq.quotas.get("push", "a").rate) == (400, 9)
    assert "has changed again" in answer.content.decode()


def test_a_pause_is_no_change_of_a_quota(shop: Any, operator: Any) -> None:
    quota = shop.dq.quotas.set("push", "a", rate="5/s")
    asked = operator.post("/dq/tenant/quota/", {**TENANT, "rate": "7/s"}).content.decode()
    shop.dq.quotas.pause("push", "a")
    text = undo_of(operator.post("/dq/tenant/quota/", hidden_fields(asked)))
    shop.dq.quotas.resume("push", "a")
    assert "The change is undone" in undo(operator, text).content.decode()
    assert shop.dq.quotas.get("push", "a") == quota
    # The other way round: paused at first.
    shop.dq.quotas.pause("push", "a")
    text = undo_of(operator.post("/dq/tenant/quota/remove/", {**TENANT, "confirmed": "1"}))
    shop.dq.quotas.resume("push", "a")
    undo(operator, text)
    assert shop.dq.quotas.get("push", "a") == quota


def test_an_undo_is_signed_for_its_tenant_and_a_day(
    shop: Any, operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.dq.quotas.set("push", "a", rate="5/s")
    text = undo_of(operator.post("/dq/tenant/quota/", {**TENANT, "rate": "7/s", "confirmed": "1"}))
    other = signing.dumps(signing.loads(text, salt="celery_dq.undo"), salt="other")
    for answer in (undo(operator, other), undo(operator, ""), undo(operator, text, tenant="b")):
        assert answer.status_code == 400
    later = time.time() + 86_401
    monkeypatch.setattr(time, "time", lambda: later)
    # The session of the user is over by then, too, so the undo is read by itself.
    with pytest.raises(InvalidRequest, match="too long ago"):
        Undo.read(text)


def test_the_audit_trail_shows_the_user_and_the_reason_of_a_change(shop: Any, operator: Any) -> None:
    shop.dq.quotas.pause("mail", "m")
    operator.post("/dq/tenant/quota/", {**TENANT, "rate": "7/s", "confirmed": "1", "audit_reason": " sale "})
    entries = json.loads(operator.get("/dq/audit/?format=json").content)["entries"]
    assert [(each["queue"], each["action"], each["door"]) for each in entries] == [
        ("push", "quota_set", "dashboard"),
        ("mail", "paused", "app.dq"),
    ]
    assert entries[0]["details"].endswith("; reason: sale")
    found = json.loads(operator.get("/dq/audit/?format=json&queue=mail&since=1h").content)["entries"]
    assert [each["queue"] for each in found] == ["mail"]
    assert "No change matches." in operator.get("/dq/audit/?queue=nowhere").content.decode()
    assert operator.get("/dq/audit/?since=soon").status_code == 400
    assert "No change matches." in operator.get("/dq/audit/?since=9999-12-31T23:59-12:00").content.decode()
