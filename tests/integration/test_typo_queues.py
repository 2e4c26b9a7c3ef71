"""A typo in ``-Q``: the worker warns, the doctor reports the queue, and it can be removed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery.contrib.testing.worker import start_worker

from celery_dq.app.checks.doctor import check_server
from celery_dq.errors import InvalidRequest
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.worker.start_checks import MOST_TYPED
from tests.dq_command import Run
from tests.integration.shop import claim, dead_letter, send


def unused(app: Any) -> list[str]:
    return [f"{each.problem} {each.remedy}" for each in check_server(app) if each.code == "W026"]


def declare(app: Any, *names: str) -> None:
    with app.dq._broker.channel() as channel:
        for name in names:
            channel.queue_declare(name)


def test_the_worker_warns_of_a_queue_without_messages_and_with_a_close_name(
    shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    send(shop, "acme")
    send(shop, "acme", queue="pushes")
    shop.conf.task_routes = {"invoice": {"queue": "invoices"}, "bill": "bills"}
    shop.conf.worker_hijack_root_logger = False
    shop.amqp.queues.select(["push", "pusch", "pushes", "invoices", "bills", "elsewhere", "push/0"])
    with start_worker(shop, pool="solo", perform_ping_check=False, shutdown_timeout=20, loglevel="WARNING"):
        pass
    records = [each for each in caplog.records if getattr(each, "event", "") == "queue_name_doubtful"]
    assert [each.queue for each in records] == ["pusch"]  # type: ignore[attr-defined]  # of `extra`
    assert "Did you mean 'push'?" in records[0].getMessage()


def test_the_worker_compares_no_names_that_a_program_chose(
    shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    send(shop, "acme")
    shop.conf.worker_hijack_root_logger = False
    shop.amqp.queues.select([f"push{n}" for n in range(MOST_TYPED + 1)])
    with start_worker(shop, pool="solo", perform_ping_check=False, shutdown_timeout=20, loglevel="WARNING"):
        pass
    assert not [each for each in caplog.records if getattr(each, "event", "") == "queue_name_doubtful"]


def test_the_doctor_reports_queues_that_never_had_a_message(run: Run, shop: Any) -> None:
    shop.conf.dq_queues = {"rare": {}}
    send(shop, "acme")
    assert unused(shop) == []
    declare(shop, "pusch", "rare", "used")
    send(shop, "acme", queue="used")
    claim(shop, queue="used")
    with shop.dq._broker.open_home("pusch") as (partition, client):
        partition.claim("w", lease_ms=60_000, want=0).run(client)
    (text,) = unused(shop)
    assert "names them: 'pusch' (a worker consumes it; did you mean 'push'?). A typo in -Q" in text
    assert "celery dq queues pusch --forget" in text
    run("purge used --yes")
    assert "'used'" not in unused(shop)[0]


def unrouted(app: Any) -> str:
    return "".join(f"{each.problem} {each.remedy}" for each in check_server(app) if each.code == "W035")


def test_the_doctor_reports_quotas_to_which_no_task_is_routed(shop: Any) -> None:
    shop.conf.dq_queues = {"webhooks": {"rate": "20/s"}, "llm": {"concurrency": 2}, "wide": {"partitions": 2}}
    shop.conf.task_routes = [lambda name, *_, **__: {"queue": "llm"}]
    shop.dq.quotas.set("push", "acme", rate="5/s")
    declare(shop, "wide")
    shop.dq.quotas.set("mail", "acme", rate="5/s")
    assert "no task is routed to them: 'mail', 'webhooks'." in unrouted(shop)
    assert "task_routes = {'<task>': 'mail'}" in unrouted(shop)
    send(shop, "acme", queue="mail")
    assert "to them: 'webhooks'." in unrouted(shop)
    shop.conf.task_routes = {"elsewhere.*": {"queue": "webhooks"}, "notify": "llm"}
    assert unrouted(shop) == ""


def test_an_unused_queue_is_forgotten(run: Run, shop: Any) -> None:
    send(shop, "acme")
    declare(shop, "pusch", "other")
    shop.dq.quotas.set("pusch", "acme", rate=5)
    assert json.loads(run("queues", "pusch", "other", "--forget", "--json")) == {
        "forgotten": ["pusch", "other"]
    }
    assert list(shop.dq.queues) == ["push"]
    assert unused(shop) == []
    assert not shop.dq.queues["pusch"].forget()
    assert [(each.action, each.queue) for each in shop.dq.audit(limit=2)] == [
        ("forgotten", "other"),
        ("forgotten", "pusch"),
    ]
    assert "There is no queue 'pusch'" in run("queues", "pusch", "--forget", status=1)
    assert "--forget needs NAMES" in run("queues", "--forget", status=2)
    declare(shop, "pusch")
    assert shop.dq.quotas.get("pusch", "acme").rate == 5


def test_a_queue_in_use_is_not_forgotten(run: Run, shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for use, words in (
        (lambda: send(shop, "a"), "messages: 1"),
        (lambda: claim(shop), "messages: 1, consumers: 1"),
        (lambda: dead_letter(shop), "dead letters: 1, consumers: 1"),
    ):
        use()
        assert words in run("queues", "push", "--forget", status=1)
    assert list(shop.dq.queues) == ["push"]
    # A message that comes between the look and the removal.
    declare(shop, "late")
    withdraw = shop.dq._broker.withdraw

    def published_meanwhile(client: Any, queue: str) -> Any:
        send(shop, "a", queue="late")
        return withdraw(client, queue)

    monkeypatch.setattr(shop.dq._broker, "withdraw", published_meanwhile)
    with pytest.raises(InvalidRequest, match="messages: 1"):
        shop.dq.queues["late"].forget()
    del shop.amqp.queues["late"]  # the call has put it there, too
    assert "late" in shop.dq.queues
    assert [each.action for each in shop.dq.audit()] == []


def test_a_queue_that_a_worker_is_about_to_lead_is_not_forgotten(run: Run, shop: Any) -> None:
    declare(shop, "pusch")
    with shop.dq._broker.channel() as channel:
        RedisElection(channel.client, PartitionKeys("online", "pusch"), "w1").accept(0, 60.0)
    assert "a worker leads 'pusch'" in run("queues", "pusch", "--forget", status=1)
    assert "pusch" in shop.dq.queues
    assert [each.action for each in shop.dq.audit()] == []
