"""Tools that replace methods of Celery and kombu see each call, and no call gets headers of another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Task
from kombu import Producer

import celery_dq
from celery_dq.app.publishing.message_template import MessageTemplates
from celery_dq.producer.buffering_producer import BufferingProducer
from tests.producer.conftest import MakeApp, Stored

ROOT = Path(__file__).parents[2]

Method = Callable[..., Any]


def work(a: int = 0) -> None: ...


@pytest.mark.parametrize("order", ["first", "last"])
def test_each_call_has_the_trace_of_its_caller_under_sentry(order: str, dq_url: str, stored: Stored) -> None:
    program = [sys.executable, "-m", "tests.producer.sentry_shop", order, dq_url]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert len({trace for _, trace in made}) == len(made) == 21
    found = []
    for task_id, _ in made:
        headers = stored.message("celery", task_id)[0]
        found.append([task_id, headers.get("sentry-trace", "").partition("-")[0]])
    assert found == made


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

        def accept(message: Any, exchange: str, key: str, declare: Any, made: list[Any] = made) -> None:
            made.append((message, exchange, key))

        app.send_task("known", (1,), producer=BufferingProducer(accept))
        ((message, exchange, key),) = made
        message["headers"].update(headers)
        fast.learn(("known",), "p0/celery", message, exchange, key)
        assert (fast.get(("known",)) is not None) == kept
