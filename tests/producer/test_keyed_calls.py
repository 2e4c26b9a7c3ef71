"""The fast path of a call with a dedup key: same message, verdict of the broker, all hooks called."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from celery.result import AsyncResult

from celery_dq.dedup.machine import Verdict
from celery_dq.dedup.signals import verdict_given
from celery_dq.errors import DuplicateCall, InvalidKey
from celery_dq.testing.waiting import wait_until
from tests.producer.conftest import MakeApp, Stored

RULES: dict[str, dict[str, Any]] = {
    "declining": {"key": "{a}"},
    "replacing": {"key": "{a}", "on_duplicate": "replace", "waiting": 0},
    "strict": {"key": "{a}", "on_duplicate": "raise", "timeout": 30},
    "whole": {"timeout": 0.5, "name": "ü"},
}
CALLS: list[dict[str, Any]] = [
    {"args": (1,)},
    {"args": ("it's é",), "kwargs": {"b": None}, "tenant": 7},
    {"kwargs": {"a": "x" * 300}, "ignore_result": True, "priority": 3},
    {"args": (1,), "task_id": "mine"},
    {"args": (1,), "task_id": "mine", "ignore_result": True},
    {"args": (1,), "time_limit": 5},
    {"args": (1,), "time_limit": 500, "soft_time_limit": 4},
]


def work(a: Any, b: Any = 0) -> None: ...


@pytest.fixture
def app(make_app: MakeApp) -> Any:
    app: Any = make_app(dq_buffer=False)
    for name, rule in RULES.items():
        app.task(name=name, shared=False, dedup=rule)(work)
    app.task(name="plain", shared=False)(work)
    return app


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_the_message_is_celerys(
    app: Any, stored: Stored, quick: list[Any], name: str, options: dict[str, Any]
) -> None:
    task, found = app.tasks[name], []
    for turn in range(4):
        producer = app.producer_pool.acquire(block=True) if turn == 0 else None
        result = task.apply_async(producer=producer, **options)
        if producer is not None:
            producer.release()
        assert (type(result), result.verdict) == (app.AsyncResult, Verdict.ACCEPT)
        assert (result.covering, result.ignored) == (result.id, options.get("ignore_result", False))
        record = stored.record("celery", result.id)
        envelope = record.envelope.replace(result.id.encode(), b"ID")
        found.append((envelope, record.body, record.dedup, record.tenant, record.priority, record.task))
        app.dq.queues["celery"].purge()
    assert found[1:] == found[:1] * 3
    assert len(quick) == 2


def test_a_call_that_is_not_plain_goes_celerys_way(app: Any, quick: list[Any]) -> None:
    task, plain = app.tasks["declining"], app.tasks["plain"]
    task.delay(0), task.delay(1)
    assert len(quick) == 1
    assert task.apply_async((2,), dedup={"waiting": 0}).verdict is Verdict.ACCEPT
    assert not hasattr(task.apply_async((2,), dedup=False), "verdict")
    assert task.apply_async((3,), countdown=60).verdict is Verdict.ACCEPT
    assert task.apply_async((4,), link=plain.si(1)).verdict is Verdict.ACCEPT
    assert task.apply_async((5,), retry=False).verdict is Verdict.ACCEPT
    assert len(quick) == 1
    assert app.send_task("declining", (1,)).verdict is Verdict.DECLINE
    assert app.send_task("declining", (1,)).verdict is Verdict.DECLINE
    assert len(quick) == 2
    plain.delay(1), plain.delay(1)
    assert not hasattr(quick[-1], "verdict")


def test_another_rule_of_the_task_is_seen(app: Any, quick: list[Any]) -> None:
    old = app.tasks["declining"]
    old.delay(0), old.delay(1)
    assert len(quick) == 1
    del app.tasks["declining"]
    new = app.task(name="declining", shared=False, dedup={"key": "{a}-{b}"})(work)
    assert new.delay(1).verdict is Verdict.ACCEPT
    assert app.dq.dedup["celery"].inspect("declining{a}-{b}(a=1,b=0)") is not None
    assert len(quick) == 1


def test_declined_followed_and_refused(app: Any, quick: list[Any], stored: Stored) -> None:
    task = app.tasks["declining"]
    first = task.delay(1)
    declined = task.delay(1)
    named = task.apply_async((1,), task_id="mine")
    assert (declined.verdict, declined.id, declined.covering) == (Verdict.DECLINE, first.id, first.id)
    assert isinstance(declined, AsyncResult)
    # Its caller has the id, so the message is kept and gets the result.
    assert (named.verdict, named.id, named.covering) == (Verdict.DECLINE, "mine", first.id)
    assert quick == [declined, named]
    assert stored.count("celery") == 2
    assert app.dq.dedup["celery"].verdicts() == {"accept": 1, "decline": 1, "follow": 1}


def test_replaced(app: Any, quick: list[Any], stored: Stored) -> None:
    task = app.tasks["replacing"]
    first = task.apply_async((1,), ignore_result=True)
    second = task.apply_async((1,), {"b": 2}, ignore_result=True)
    assert quick == [second]
    assert (second.verdict, second.covering) == (Verdict.ACCEPT, second.id)
    assert second.id != first.id
    assert str(stored.record("celery", second.id).body).startswith('[[1], {"b": 2}, ')
    assert app.dq.dedup["celery"].verdicts() == {"accept": 2, "replace": 1}


def test_errors_are_those_of_the_long_way(app: Any, quick: list[Any]) -> None:
    task = app.tasks["strict"]
    task.delay(0)
    first = task.delay(1)
    assert quick == [first]
    with pytest.raises(DuplicateCall, match=f"strict: {first.id} covers this call") as caught:
        task.delay(1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(InvalidKey, match="no canonical form"):
        app.tasks["declining"].delay(object())
    with pytest.raises(InvalidKey, match="no canonical form"):
        task.delay(1j)
    # The connection was returned to the pool each time.
    assert task.delay(2).verdict is Verdict.ACCEPT


def test_the_signal_is_sent(app: Any, quick: list[Any]) -> None:
    received: list[Any] = []

    def receive(sender: str, **text: Any) -> None:
        received.append(
            (sender, text["verdict"], text["key"], text["task_id"], text["covering"], text["replaced"])
        )

    task = app.tasks["declining"]
    task.delay(0)
    verdict_given.connect(receive)
    first = task.delay(1)
    task.delay(1)
    verdict_given.disconnect(receive)
    assert len(quick) == 2
    assert received[0] == ("declining", Verdict.ACCEPT, "declining(a=1)", first.id, first.id, "")
    assert received[1][1:3] == (Verdict.DECLINE, "declining(a=1)")
    assert received[1][3] != received[1][4] == first.id


def test_a_declined_call_does_not_end_the_wait_for_other_results(make_app: MakeApp) -> None:
    app: Any = make_app(dq_buffer=False, result_backend="rpc://")
    task = app.task(name="declining", shared=False, dedup=RULES["declining"])(work)
    awaited = app.task(name="plain", shared=False)(work).delay(1)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(awaited.get(timeout=30)))
    thread.start()
    replies = app.backend.result_consumer
    wait_until(lambda: replies._consumer and replies._consumer.consuming_from(app.thread_oid), 30)
    covering = task.delay(1)
    for _ in range(2):
        assert task.delay(1).id == covering.id
    request = SimpleNamespace(reply_to=app.thread_oid, correlation_id=awaited.id)
    app.backend.store_result(awaited.id, 5, "SUCCESS", request=request)
    thread.join(30)
    assert got == [5]
