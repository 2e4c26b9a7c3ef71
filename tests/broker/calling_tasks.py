"""A Celery app whose tasks call others in every way, and report the tenants that these get."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from celery import Celery, chain, chord, group

from tests.apps import task
from tests.conformance.shop import own_witness
from tests.workers import ENVIRONMENT, app_from_environment

NAME = "calling_tasks"

#: Makes the signature of a child with a label; the options are those of the call.
Child = Callable[..., Any]


def add_tasks(app: Any, port: int) -> None:
    """Register the tasks, which report to the witness on `port`."""

    def report(request: Any, label: str) -> None:
        # A label begins with the name of the call that the test has made.
        way, _, name = label.partition(":")
        tenant = (request.properties or {}).get("tenant", "")
        own_witness(port).report(f"{app.conf.task_default_queue} {way}", f"{name}: {tenant!r}")

    @task(app, name="child", bind=True)
    def child(self: Any, *args: Any) -> Any:
        report(self.request, args[-1])
        return args[-1]

    @task(app, name="routed", bind=True)
    def routed(self: Any, label: str) -> None:
        report(self.request, label)

    @task(app, name="ruled", bind=True, tenant="{owner}")
    def ruled(self: Any, label: str, owner: str | None = None) -> None:
        report(self.request, label)

    @task(app, name="failing")
    def failing() -> None:
        raise ValueError("this task fails on purpose")

    @task(app, name="helper", bind=True)
    def helper(self: Any, label: str) -> None:
        """Call a child in the process of the caller."""
        if self.request.properties:
            self.apply((label,))
        else:
            child.delay(label)

    @task(app, name="call", bind=True, max_retries=1)
    def call(self: Any, way: str) -> Any:
        return WAYS[way](self, lambda label, **options: made(way, label, **options))

    @task(app, name="call_later", bind=True)
    def call_later(self: Any, way: str) -> None:
        """Make a call when the test releases it."""
        tenant = self.request.properties["tenant"]
        report(self.request, f"{way}:began by {tenant}")
        own_witness(port).hold(f"{app.conf.task_default_queue} {way}")
        child.delay(f"{way}:call of {tenant}")

    def made(way: str, label: str, task: str = "child", **options: Any) -> Any:
        arguments = () if task == "failing" else (f"{way}:{label}",)
        return app.signature(task, arguments, immutable=True, **options)


def retry(task: Any, child: Child) -> None:
    child(f"attempt {task.request.retries}").apply_async()
    if not task.request.retries:
        raise task.retry(countdown=0)


def nested(task: Any, child: Child) -> None:
    helper = task.app.tasks["helper"]
    helper("nested:called")
    helper.apply(("nested:applied",))
    child("by itself", task="helper").apply_async()


@cache
def canvas(app: Any) -> Any:
    """Make a canvas that several tasks call."""
    child = [app.signature("child", (f"canvas:{number}",), immutable=True) for number in range(5)]
    return chain(child[0], chord([child[1], child[2]], child[3]), child[4])


def thread(task: Any, child: Child) -> None:
    other = threading.Thread(target=child("call").apply_async)
    other.start()
    other.join()


#: Every way in which a task calls others. The task runs with the tenant `a`.
WAYS: dict[str, Callable[[Any, Child], Any]] = {
    "delay": lambda task, child: task.app.tasks["child"].delay("delay:call"),
    "apply_async": lambda task, child: child("call").apply_async(priority=5, countdown=0.001),
    "send_task": lambda task, child: task.app.send_task("child", ("send_task:call",)),
    "buffered": lambda task, child: child("call").apply_async(buffered=True),
    "explicit": lambda task, child: child("call").apply_async(tenant="b"),
    "none": lambda task, child: child("call").apply_async(tenant=""),
    "default": lambda task, child: child("call").apply_async(tenant=None),
    "routed": lambda task, child: child("call", task="routed").apply_async(),
    "ruled": lambda task, child: [
        task.app.tasks["ruled"].delay("ruled:owned", "b"),
        task.app.tasks["ruled"].delay("ruled:not owned"),
    ],
    "group": lambda task, child: group(child("1"), child("2", tenant="b")).apply_async(),
    "group with tenant": lambda task, child: group(child("1"), child("2")).apply_async(tenant="b"),
    "chain": lambda task, child: chain(child("1"), child("2", tenant="b"), child("3")).apply_async(),
    "link": lambda task, child: child("1", tenant="b").apply_async(link=child("2")),
    "link_error": lambda task, child: child("", task="failing").apply_async(link_error=child("errback")),
    "chord": lambda task, child: chord([child("1", tenant="b"), child("2", tenant="b")])(child("body")),
    "failed header": lambda task, child: chord(
        [child("", task="failing", tenant="b"), child("1", tenant="c")]
    )(child("body").on_error(child("errback"))),
    "chord of one": lambda task, child: chord([child("1", tenant="b")])(child("body")),
    "chord with tenant": lambda task, child: chord([child("1"), child("2")]).apply_async(
        kwargs={"body": child("body")}, tenant="b"
    ),
    "body with tenant": lambda task, child: chord([child("1"), child("2")])(child("body", tenant="b")),
    "chained body": lambda task, child: chord([child("1", tenant="b"), child("2", tenant="b")])(
        chain(child("3"), child("4"))
    ),
    "grouped body": lambda task, child: chord([child("1", tenant="b"), child("2", tenant="b")])(
        group(child("3"), child("4"))
    ),
    "nested chord": lambda task, child: chord(
        [
            child("1", tenant="b"),
            chain(child("2", tenant="c"), chord([child("3", tenant="d"), child("4")], child("inner"))),
        ]
    )(child("outer")),
    "chord in a chain": lambda task, child: chain(
        child("1", tenant="b"), group(child("2", tenant="c"), child("3")), child("4")
    ).apply_async(),
    "canvas": lambda task, child: canvas(task.app).apply_async(),
    "chord as body": lambda task, child: chord([child("1", tenant="b"), child("2", tenant="b")])(
        chord([child("3"), child("4", tenant="c")], child("body"))
    ),
    "replace": lambda task, child: task.replace(child("call")),
    "replace by group": lambda task, child: task.replace(group(child("1", tenant="b"), child("2"))),
    "retry": retry,
    "nested": nested,
    "thread": thread,
}

#: The tenants that their tasks get.
TENANTS: dict[str, dict[str, str]] = {
    "delay": {"call": "a"},
    "apply_async": {"call": "a"},
    "send_task": {"call": "a"},
    "buffered": {"call": "a"},
    "explicit": {"call": "b"},
    "none": {"call": ""},
    "default": {"call": "a"},
    "routed": {"call": "r"},
    "ruled": {"owned": "b", "not owned": "a"},
    "group": {"1": "a", "2": "b"},
    "group with tenant": {"1": "b", "2": "b"},
    "chain": {"1": "a", "2": "b", "3": "b"},
    "link": {"1": "b", "2": "b"},
    "link_error": {"errback": "a"},
    "chord": {"1": "b", "2": "b", "body": "a"},
    "failed header": {"1": "c", "errback": "a"},
    "chord of one": {"1": "b", "body": "a"},
    "chord with tenant": {"1": "b", "2": "b", "body": "b"},
    "body with tenant": {"1": "a", "2": "a", "body": "b"},
    "chained body": {"1": "b", "2": "b", "3": "a", "4": "a"},
    "grouped body": {"1": "b", "2": "b", "3": "a", "4": "a"},
    "nested chord": {"1": "b", "2": "c", "3": "d", "4": "c", "inner": "c", "outer": "a"},
    "chord in a chain": {"1": "b", "2": "c", "3": "b", "4": "b"},
    "canvas": {"0": "a", "1": "a", "2": "a", "3": "a", "4": "a"},
    "chord as body": {"1": "b", "2": "b", "3": "a", "4": "c", "body": "a"},
    "replace": {"call": "a"},
    "replace by group": {"1": "b", "2": "a"},
    "retry": {"attempt 0": "a", "attempt 1": "a"},
    "nested": {"called": "a", "applied": "a", "by itself": "a"},
    "thread": {"call": ""},
}

if ENVIRONMENT in os.environ:
    app: Celery = app_from_environment(NAME)
    add_tasks(app, app.conf["witness_port"])
