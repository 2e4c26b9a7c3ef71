"""Tools that replace methods of Celery and kombu see each call, and no call gets headers of another one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals
from celery.app.task import Task
from celery.utils.saferepr import saferepr
from kombu import Producer

import celery_dq
from celery_dq.app.publishing.message_template import MessageTemplates
from celery_dq.producer.buffering_producer import BufferingProducer
from celery_dq.testing.waiting import wait_until
from tests.producer.conftest import MakeApp, Stored

ROOT = Path(__file__).parents[2]

Method = Callable[..., Any]


def work(a: int = 0) -> None: ...


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize(
    ("tool", "header", "calls"), [("sentry", "sentry-trace", 21), ("opentelemetry", "traceparent", 15)]
)
def test_each_call_has_the_trace_of_its_caller(
    tool: str, header: str, calls: int, order: str, dq_url: str, stored: Stored
) -> None:
    program = [sys.executable, "-m", "tests.producer.instrumented_shop", tool, order, dq_url]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    reported = json.loads(ran.stdout)
    made = reported["made"]
    assert len({trace for _, trace in made}) == len(made) == calls
    found = []
    for task_id, _ in made:
        trace = stored.message("celery", task_id)[0].get(header, "")
        found.append([task_id, re.search("[0-9a-f]{32}", trace)[0]])  # type: ignore[index]
    assert found == made
    assert reported["spans"] == calls
    # Only the first call of each kind takes Celery's way.
    expected = {task_id for task_id, _ in made}
    assert expected >= set(reported["packed"])
    assert len(reported["packed"]) >= (calls if order == "last" else calls - 3)


class Patched:
    """A replacement for a method of a class, as tools use it: it records each call and may add a header."""

    def __init__(
        self, owner: type, name: str, monkeypatch: pytest.MonkeyPatch, decorate: Any, *, adds_header: bool
    ) -> None:
        self.seen = 0
        original: Method = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            self.seen += 1
            if adds_header:
                options["headers"] = {**(options.get("headers") or {}), "x-number": self.seen}
            return original(*args, **options)

        monkeypatch.setattr(owner, name, decorate(original)(noted))


PATCHES = [(Task, "apply_async"), (Celery, "send_task"), (Producer, "publish")]


@pytest.mark.parametrize("decorate", [wraps, lambda original: lambda method: method], ids=["wraps", "bare"])
@pytest.mark.parametrize("adds_header", [True, False], ids=["adds a header", "only looks"])
@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "direct"])
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize(("owner", "name"), PATCHES, ids=[name for _, name in PATCHES])
def test_a_patched_method_sees_every_call(
    make_app: MakeApp,
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    order: str,
    buffered: bool,
    adds_header: bool,
    decorate: Any,
) -> None:
    def patch() -> Patched:
        return Patched(owner, name, monkeypatch, decorate, adds_header=adds_header)

    tool = patch() if order == "first" else None
    app = make_app(dq_buffer=buffered)
    task: Any = app.task(name="known", shared=False)(work)
    for _ in range(4):
        task.delay(1)
        app.send_task("known", (1,))
        app.send_task("elsewhere", (1,))
    if tool is None:
        tool = patch()
    before = tool.seen
    ids = [task.delay(1).id for _ in range(3)]
    if owner is not Task:
        ids += [app.send_task(each, (1,)).id for each in ("known", "elsewhere") for _ in range(3)]
    assert tool.seen - before == len(ids)
    assert app.dq.buffer.flush(30) == 0
    numbers = [stored.message("celery", task_id)[0].get("x-number") for task_id in ids]
    assert numbers == [before + 1 + at if adds_header else None for at in range(len(ids))]


def test_a_patched_way_to_the_channel_sees_every_direct_call(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    task: Any = make_app(dq_buffer=False).task(name="known", shared=False)(work)
    for _ in range(4):
        task.delay(1)
    tool = Patched(Producer, "_publish", monkeypatch, wraps, adds_header=False)
    for _ in range(3):
        task.delay(1)
    assert tool.seen == 3


def noting(owner: Any, name: str) -> list[Any]:
    """Replace a method of one object by one that records its calls; return the records."""
    seen: list[Any] = []
    original = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(args)
        return original(*args, **options)

    setattr(owner, name, noted)
    return seen


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "direct"])
@pytest.mark.parametrize("order", ["before set-up", "before the first call", "later"])
def test_a_send_task_of_the_apps_own_sees_every_call(dq_url: str, order: str, buffered: bool) -> None:
    app: Any = Celery("shop", broker=dq_url, set_as_current=False)
    app.conf.update(dq_buffer=buffered, dq_buffer_folder="")
    seen = noting(app, "send_task") if order == "before set-up" else None
    celery_dq.setup(app)
    if order == "before the first call":
        seen = noting(app, "send_task")
    task: Any = app.task(name="known", shared=False)(work)
    for _ in range(4):
        task.delay(1)
    if seen is None:
        seen = noting(app, "send_task")
    before = len(seen)
    for _ in range(4):
        task.delay(1)
    assert len(seen) - before == 4
    app.dq.buffer.close()
    app.close()


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "direct"])
@pytest.mark.parametrize("order", ["first", "last"])
def test_a_task_sender_of_the_apps_own_sees_every_call(make_app: MakeApp, order: str, buffered: bool) -> None:
    app: Any = make_app(dq_buffer=buffered)
    task: Any = app.task(name="known", shared=False)(work)
    seen = noting(app.amqp, "send_task_message") if order == "first" else None
    for _ in range(4):
        task.delay(1)
    if seen is None:
        seen = noting(app.amqp, "send_task_message")
    before = len(seen)
    for _ in range(4):
        task.delay(1)
    assert len(seen) - before == 4


def test_a_template_holds_no_header_that_celery_does_not_write(make_app: MakeApp) -> None:
    app: Any = make_app()
    for headers, kept in (({}, True), ({"traceparent": "1"}, False), ({"shadow": "other"}, False)):
        made: list[Any] = []
        fast = MessageTemplates(app)

        def accept(message: Any, exchange: str, key: str, declare: Any, made: list[Any] = made) -> Any:
            made.append((message, exchange, key))

        app.send_task("known", (1,), producer=BufferingProducer(accept, lambda _: None))
        ((message, exchange, key),) = made
        message["headers"].update(headers)
        fast.learn(("known",), "p0/celery", message, exchange, key, {})
        assert (fast.by_kind.get(("known",)) is not None) == kept


def many(*args: Any, **kwargs: Any) -> None: ...


def look(**_: Any) -> None: ...


def add_headers(headers: dict[str, Any], **_: Any) -> None:
    headers["traceparent"] = "00-ab-cd-01"
    headers["headers"] = {"é": ["%s", None]}


def change_much(headers: dict[str, Any], properties: dict[str, Any], body: Any, **_: Any) -> None:
    headers["timelimit"][0] = 60
    headers["shadow"] = "another"
    properties["priority"] = 7
    body[1]["more"] = [1]


def change_headers(headers: dict[str, Any], **_: Any) -> None:
    headers["timelimit"][0] = 60
    headers["shadow"] = "another"


def change_the_body(body: Any, **_: Any) -> None:
    body[1]["more"] = [1]


#: Receivers, whether tools replace methods, whether events are sent, and whether messages fit their template.
OBSERVERS: dict[str, tuple[Any, bool, bool, bool]] = {
    "looks": (look, False, False, True),
    "adds headers": (add_headers, False, False, True),
    "changes much": (change_much, False, False, False),
    "changes headers": (change_headers, False, False, False),
    "changes the body": (change_the_body, False, False, True),
    "tools": (None, True, False, True),
    "tools and a receiver": (add_headers, True, False, True),
    "tools and a changing receiver": (change_much, True, False, False),
    "events": (None, False, True, True),
    "all": (add_headers, True, True, True),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tenant": 7, "headers": {"x": 1}},
    {"priority": 3, "time_limit": 5, "ignore_result": True, "queue": "push"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "direct"])
def test_the_message_of_an_observed_call_is_celerys(
    make_app: MakeApp,
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
    buffered: bool,
    observer: str,
    options: dict[str, Any],
) -> None:
    receiver, tools, events, fits = OBSERVERS[observer]
    app: Any = make_app(dq_buffer=buffered, task_send_sent_event=events)
    task: Any = app.task(name="known", shared=False)(many)
    packed: list[Any] = []
    refill = MessageTemplates.refill

    def noted(*args: Any) -> Any:
        packed.append(refill(*args))
        return packed[-1]

    monkeypatch.setattr(MessageTemplates, "refill", noted)
    if tools:
        for owner, name in PATCHES:
            Patched(owner, name, monkeypatch, wraps, adds_header=False)
    if receiver is not None:
        signals.before_task_publish.connect(receiver)
    try:
        # Celery's way, because of a producer of the caller's own.
        with app.producer_pool.acquire(block=True) as producer:
            celerys = task.apply_async((1, "it's"), {"b": None}, producer=producer, **options).id
        ids = [task.apply_async((1, "it's"), {"b": None}, **options).id for _ in range(3)]
    finally:
        if receiver is not None:
            signals.before_task_publish.disconnect(receiver)
    assert app.dq.buffer.flush(30) == 0
    queue = options.get("queue", "celery")
    wanted = message_without_id(stored, queue, celerys)
    assert [message_without_id(stored, queue, each) for each in ids] == [wanted] * 3
    fitting = [message.id for message in packed if message is not None]
    assert fitting == (ids[1:] if fits else [])


def message_without_id(stored: Stored, queue: str, task_id: str) -> Any:
    record = stored.record(queue, task_id)
    headers, properties, body = stored.message(queue, task_id)
    assert (headers.pop("id"), headers.pop("root_id"), properties.pop("correlation_id")) == (task_id,) * 3
    return record.tenant, record.task, record.priority, headers, properties, body


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "direct"])
def test_a_template_that_was_learnt_under_observation_has_no_header_of_its_first_call(
    make_app: MakeApp, stored: Stored, buffered: bool
) -> None:
    app: Any = make_app(dq_buffer=buffered)
    task: Any = app.task(name="known", shared=False)(many)
    signals.before_task_publish.connect(add_headers)
    try:
        ids = [task.apply_async((1,), headers={"x": 1}).id for _ in range(2)]
    finally:
        signals.before_task_publish.disconnect(add_headers)
    ids += [task.apply_async((1,), headers=headers).id for headers in ({"x": 2}, None)]
    assert app.dq.buffer.flush(30) == 0
    found = [stored.message("celery", each)[0] for each in ids]
    assert [each.get("x") for each in found] == [1, 1, 2, None]
    assert ["traceparent" in each for each in found] == [True, True, False, False]


def test_a_route_with_headers_makes_no_template(make_app: MakeApp, stored: Stored, quick: list[Any]) -> None:
    app: Any = make_app(dq_buffer=False, task_routes={"known": {"queue": "push", "headers": {"shop": "a"}}})
    task: Any = app.task(name="known", shared=False)(many)
    ids = [task.delay(1).id for _ in range(3)]
    assert [stored.message("push", each)[0].get("shop") for each in ids] == ["a"] * 3
    assert quick == []


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "direct"])
def test_each_call_has_an_event(make_app: MakeApp, buffered: bool) -> None:
    app: Any = make_app(dq_buffer=buffered, task_send_sent_event=True)
    task: Any = app.task(name="known", shared=False)(many)
    seen: list[dict[str, Any]] = []
    ready = threading.Event()
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"task-sent": seen.append})
        receiver.on_consume_ready = lambda *_, **__: ready.set()
        listener = threading.Thread(target=receiver.capture, kwargs={"limit": None, "wakeup": False})
        listener.start()
        assert ready.wait(30)
        ids = [task.delay("it's").id for _ in range(4)]
        assert app.dq.buffer.flush(30) == 0
        wait_until(lambda: len(seen) >= 4, 30)
        receiver.should_stop = True
        listener.join(30)
    assert [event["uuid"] for event in seen] == ids
    assert {(event["name"], event["args"], event["kwargs"], event["queue"]) for event in seen} == {
        ("known", saferepr(("it's",)), "{}", "celery")
    }
