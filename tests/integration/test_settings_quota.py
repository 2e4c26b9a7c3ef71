"""The quota from workers' settings: which worker stores it, and which of two holds."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from socket import gethostname
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue

import celery_dq
from celery_dq.app.api import map_change
from celery_dq.app.checks.doctor import check_server
from celery_dq.app.checks.finding import Finding
from celery_dq.options import Quota
from tests.dq_command import run_dq
from tests.integration.partitioned_shop import opened
from tests.integration.shop import send
from tests.integration.test_quotas_during_changes import before_next


def consume(app: Any) -> None:
    """Begin to consume ``push`` as a worker does, and stop at once."""
    with (
        app.connection_for_read() as connection,
        app.amqp.Consumer(connection, queues=[app.amqp.queues["push"]]),
    ):
        pass


@pytest.fixture
def worker(broker_url: str) -> Iterator[Callable[..., Any]]:
    """A function that makes the app of a worker with the given settings, and lets it begin to consume."""
    apps = []

    def make(**settings: Any) -> Any:
        app: Any = celery_dq.setup(Celery("other", broker=broker_url, set_as_current=False))
        app.conf.update(task_default_queue="push", **settings)
        apps.append(app)
        consume(app)
        return app

    yield make
    for app in apps:
        app.close()


def differences(app: Any) -> list[Finding]:
    return [each for each in check_server(app) if each.code == "W016"]


def test_it_holds_from_when_a_worker_consumes(shop: Any, worker: Callable[..., Any]) -> None:
    send(shop, "a", "b")
    assert not shop.dq.quotas.get("push").paused
    worker(dq_queues={"push": {"paused": True}}, dq_default_quota={"weight": 2})
    assert shop.dq.quotas.get("push") == Quota(paused=True, weight=2)
    shop.dq.quotas.set("push", "b", paused=False)
    send(shop, "c")  # a producer whose settings name no quota does not change it
    assert shop.dq.quotas.get("push").paused
    worker(dq_queues={"push": {"paused": False}})
    assert shop.dq.quotas.get("push") == Quota()
    assert shop.dq.queues["push"].snapshot().paused == 0


def test_a_worker_whose_settings_report_nothing_changes_nothing(
    shop: Any, worker: Callable[..., Any]
) -> None:
    worker(dq_default_quota={"rate": 5})
    worker()
    worker(dq_queues={"push": {"max_deliveries": 3}})
    assert shop.dq.quotas.get("push") == Quota(rate=5)


def test_a_late_worker_of_before_a_deploy_changes_nothing_and_reports_it(
    shop: Any, worker: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_dq")
    old = {"dq_queues": {"push": {"rate": 5}}}
    worker(**old)
    worker(dq_queues={"push": {"rate": 50}})
    assert "rate=5/s burst=1 weight=1 concurrency=unlimited (applied by" in caplog.text
    caplog.clear()
    late = worker(**old)
    assert shop.dq.quotas.get("push") == Quota(rate=50)
    assert "these settings are older" in caplog.text
    assert "celery dq quotas apply push" in caplog.text
    # An intended rollback.
    assert late.dq.quotas.apply_settings("push") == Quota(rate=5)
    found = shop.dq.quotas.from_settings("push")
    assert found.quota == Quota(rate=5)
    assert "celery dq quotas apply" in found.by
    assert abs(datetime.now(timezone.utc) - found.at) < timedelta(minutes=2)
    # An app whose settings name no quota removes it.
    assert shop.dq.quotas.apply_settings("push") == Quota()
    assert shop.dq.quotas.from_settings("push") is None


@pytest.mark.parametrize("deployed", ["before", "under way"])
def test_a_late_worker_of_before_a_deploy_changes_nothing_in_partitions_that_were_added(
    shop: Any, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, deployed: str
) -> None:
    old, new = ({"dq_queues": {"push": {"rate": rate}}} for rate in (5, 50))
    worker(**old)
    if deployed == "before":
        worker(**new)
    else:
        before_next(monkeypatch, map_change, "_decide", lambda: worker(**new))
    shop.dq.queues["push"].set_partitions(3)
    worker(**old)
    with opened(shop) as (partitions, client):
        quotas = [client.hget(each.keys.quotas, "config") for each in partitions]
    assert quotas == [Quota(rate=50).pack()] * 3


def test_live_quotas_win_over_a_change_of_the_settings(
    shop: Any, worker: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_dq")
    shop.dq.quotas.set_default("push", rate=7)
    shop.dq.quotas.set("push", "a", rate=8)
    shop.dq.quotas.pause("push", "b")
    worker(dq_queues={"push": {"rate": 5}})
    worker(dq_queues={"push": {"rate": 50}})
    assert shop.dq.quotas.get("push") == Quota(rate=7)
    assert "the default that was set live, rate=7/s" in caplog.text
    assert shop.dq.quotas.get("push", "a") == Quota(rate=8)
    assert shop.dq.quotas.get("push", "b") == Quota(rate=7, paused=True)
    shop.dq.quotas.remove_default("push")
    assert shop.dq.quotas.get("push") == Quota(rate=50)


def test_the_doctor_compares_the_settings_with_the_broker(shop: Any, worker: Callable[..., Any]) -> None:
    assert differences(shop) == []
    old = worker(dq_queues={"push": {"rate": 5}})
    assert differences(old) == []
    new = worker(dq_queues={"push": {"rate": 50}})
    assert differences(new) == []
    (finding,) = differences(old)
    assert (finding.level, finding.code) == ("warning", "W016")
    assert "rate=5/s" in finding.problem
    assert "rate=50/s" in finding.problem
    assert "celery dq quotas apply push" in finding.remedy
    (finding,) = differences(shop)
    assert "name no quota" in finding.problem


def test_the_command_line_shows_the_author_and_the_time_of_each_quota(
    shop: Any, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ada")

    def get(*words: str) -> str:
        return run_dq(shop, "quotas", "get", "push", *words).output

    def row(source: str, by: str, found: dict[str, Any]) -> None:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(found["at"])
        assert (found["source"], by in found["by"], abs(age) < timedelta(minutes=2)) == (source, True, True)

    send(shop, "a")
    host = gethostname()
    assert "concurrency=unlimited (no quota is set)" in get()
    nothing = json.loads(get("a", "--json"))
    assert (nothing["source"], nothing["by"], nothing["at"]) == ("none", "", None)
    worker(dq_queues={"push": {"rate": 5}})
    assert f"concurrency=unlimited (from the settings, stored by {host}:{os.getpid()}:" in get("a")
    row("settings", f"{host}:{os.getpid()}:", json.loads(get("--json"))["default"])
    shop.dq.quotas.set_default("push", rate=7)
    shop.dq.quotas.set("push", "b", rate=8)
    shop.dq.quotas.pause("push", "a")
    default, b, a = get().splitlines()
    assert default.startswith("(default): rate=7/s")
    assert f"(set live by ada@{host} at 2" in default
    assert b.startswith("b: rate=8/s")
    assert f"(set live by ada@{host} at 2" in b
    assert a.startswith("a: paused since 2")
    found = json.loads(get("--json"))
    row("default", f"ada@{host}", found["default"])
    row("tenant", f"ada@{host}", found["tenants"]["b"])
    row("default", f"ada@{host}", json.loads(get("a", "--json")))
    shop.dq.quotas.remove("push", "b")
    shop.dq.quotas.remove_default("push")
    row("settings", host, json.loads(get("--json"))["default"])


def test_the_author_of_a_quota_is_known_where_its_user_has_no_name(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987_654_321)
    shop.dq.quotas.set("push", "a", rate=8)
    assert shop.dq.quotas.origins("push", "a")[0].by == f"uid 987654321@{gethostname()}"


def test_plain_kombu_leaves_the_quotas_alone(shop: Any, worker: Callable[..., Any], broker_url: str) -> None:
    worker(dq_queues={"push": {"rate": 5}})
    with Connection(broker_url) as connection, connection.Consumer(Queue("push")):
        assert shop.dq.quotas.get("push").rate == 5
