"""A broker that is down or silent, and settings that are wrong: a page with the reason, in time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from celery_dq import shared_reading
from celery_dq.contrib.django.dashboard import broker_reads
from celery_dq.contrib.django.dashboard.broker_reads import MOST_WAITING, BrokerReads, BrokerSilent
from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from tests.broker.proxy import Proxy
from tests.dashboard.test_security import PAGES
from tests.doubles.thread_limit import no_more_threads
from tests.integration.shop import send

#: Longer than the deadline of the test, shorter than any timeout of a connection.
AT_MOST_S = 4.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_reads, "DEADLINE_S", 0.3)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_reports_that_the_broker_is_down(use_app: Any, operator: Any, path: str) -> None:
    with dead_port() as port:
        use_app(f"dq-redis://:s3cret@127.0.0.1:{port}/0")
        answer = operator.get(f"/dq/{path}")
        as_json = operator.get(f"/dq/{path}{'&' if '?' in path else '?'}format=json")
    text = answer.content.decode()
    assert (answer.status_code, as_json.status_code) == (503, 503)
    assert "The broker cannot be reached" in text
    assert f'href="/dq/{path}">Try again'.replace("&", "&amp;") in text
    assert "celery dq doctor" in text
    assert "s3cret" not in text
    assert "Content-Security-Policy" in answer
    assert json.loads(as_json.content)["failure"]["status"] == 503


@pytest.mark.parametrize("path", PAGES)
def test_an_unknown_format_is_refused_with_the_known_ones(use_app: Any, operator: Any, path: str) -> None:
    with dead_port() as port:
        use_app(f"dq-redis://127.0.0.1:{port}/0")
        answer = operator.get(f"/dq/{path}{'&' if '?' in path else '?'}format=xml")
    assert answer.status_code == 400
    assert "format = &#x27;xml&#x27; is not known: give one of html, json" in answer.content.decode()


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy


def test_a_page_answers_in_time_when_the_broker_is_silent(
    use_app: Any, operator: Any, redis_server: RedisServer, proxy: Proxy, quick: None
) -> None:
    shop = use_app(f"dq-redis://127.0.0.1:{proxy.port}/0")
    send(shop, "a", queue="dashboard-silent")
    assert operator.get("/dq/").status_code == 200
    proxy.black_hole.set()
    began = time.monotonic()
    # More pages than calls may wait.
    answers = [operator.get("/dq/queue/", {"queue": f"q{number}"}) for number in range(MOST_WAITING + 2)]
    change = operator.post("/dq/tenant/pause/", {"queue": "dashboard-silent", "tenant": "a"})
    took = time.monotonic() - began
    assert {answer.status_code for answer in (*answers, change)} == {503}
    assert "The broker does not answer" in answers[0].content.decode()
    assert took < AT_MOST_S
    proxy.black_hole.clear()
    shop.dq.queues["dashboard-silent"].purge()


def test_a_broker_without_tenants_is_reported(use_app: Any, operator: Any, redis_url: str) -> None:
    use_app(redis_url)
    text = operator.get("/dq/").content.decode()
    assert "app.dq needs the tenant broker" in text
    assert operator.get("/dq/leaders/").status_code == 200


def test_a_wrong_setting_is_named(use_app: Any, operator: Any, redis_url: str) -> None:
    use_app(redis_url.replace("redis://", "dq-redis://", 1), dq_leese=5)
    answer = operator.get("/dq/")
    assert answer.status_code == 503
    assert "did you mean &#x27;dq_lease&#x27;" in answer.content.decode()


def test_a_fault_of_the_program_is_not_hidden(
    shop: Any, operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(shop.dq), "leaders", None, raising=False)
    shop.dq.leaders = None
    operator.raise_request_exception = False
    assert operator.get("/dq/leaders/").status_code == 500


def test_an_error_is_shared_for_a_second_and_then_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = BrokerReads()
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ConnectionError("down")

    for _ in range(3):
        with pytest.raises(ConnectionError, match="down"):
            reads.get("key", fail)
    assert len(calls) == 1
    monkeypatch.setattr(shared_reading, "FRESH_S", 0.0)
    with pytest.raises(ConnectionError, match="down"):
        reads.get("key", fail)
    assert len(calls) == 2


def test_reads_go_on_after_more_than_may_wait_could_not_start(quick: None) -> None:
    reads = BrokerReads()
    with no_more_threads():
        for number in range(MOST_WAITING + 1):
            with pytest.raises(RuntimeError, match="new thread"):
                reads.get(number, int)
    assert reads.get("key", int) == 0


def test_a_change_that_got_no_answer_is_reported_as_unknown(quick: None) -> None:
    go_on = threading.Event()
    with pytest.raises(BrokerSilent, match="no answer within 0.3 s"):
        BrokerReads().change(go_on.wait)
    go_on.set()


UNKNOWN = (
    "queue/?queue=pusch",
    "tenant/?queue=pusch&tenant=a",
    "dead-letters/?queue=pusch",
    "dedup/?queue=pusch",
)


@pytest.mark.parametrize("path", UNKNOWN)
def test_a_page_of_a_queue_that_does_not_exist(shop: Any, operator: Any, path: str) -> None:
    answer = operator.get(f"/dq/{path}")
    assert answer.status_code == 400
    assert "There is no queue" in answer.content.decode()


def test_a_change_of_a_queue_that_does_not_exist(shop: Any, operator: Any) -> None:
    for path in ("queue/pause/", "queue/resume/", "tenant/pause/", "tenant/quota/"):
        answer = operator.post(f"/dq/{path}", {"queue": "pusch", "tenant": "a", "rate": "3"})
        assert answer.status_code == 400, path
    assert "pusch" not in shop.dq.queues
    assert shop.dq.audit() == []


def test_a_tenant_that_nothing_is_known_of(shop: Any, operator: Any) -> None:
    send(shop, "acme")
    question = "is the name right?"
    assert question in operator.get("/dq/tenant/?queue=push&tenant=acne").content.decode()
    assert question not in operator.get("/dq/tenant/?queue=push&tenant=acme").content.decode()


def test_the_page_of_a_message_in_zookeeper(use_app: Any, operator: Any, hosts: str) -> None:
    shop = use_app(f"dq-zookeeper://{hosts}")
    (task_id,) = send(shop, "acme", countdown=60, expires=datetime(2100, 1, 1))  # no zone
    for path in ("queue/?queue=push", f"message/?id={task_id}", "message/?id=nowhere"):
        answer = operator.get(f"/dq/{path}")
        assert answer.status_code == 200, answer.content.decode()
    text = operator.get(f"/dq/message/?id={task_id}").content.decode()
    assert f"Task {task_id} in &#x27;push&#x27; is delayed." in text


def test_a_filter_by_tenant_is_refused_in_zookeeper(use_app: Any, operator: Any, hosts: str) -> None:
    use_app(f"dq-zookeeper://{hosts}")
    assert operator.get("/dq/dead-letters/?queue=push&task=notify").status_code == 200
    answer = operator.get("/dq/dead-letters/?queue=push&tenant=acme")
    assert answer.status_code == 400
    assert "a dead letter in ZooKeeper has no tenant; leave out tenant" in answer.content.decode()
