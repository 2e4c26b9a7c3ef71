"""The fast path of a call that is not buffered: same message, same errors, all hooks called."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from celery import signals
from celery.app.task import Task
from kombu import Exchange, Queue

from tests.producer.conftest import MakeApp, Stored

CALLS: list[dict[str, Any]] = [
    {},
    {"args": (1, "it's"), "kwargs": {"é": None}},
    {"args": [1], "tenant": 7},
    {"priority": 3, "ignore_result": True, "time_limit": 5},
    {"queue": "push"},
    {"queue": "fanned"},
    {"queue": Queue("push")},
    {"args": (1,), "countdown": 60},
    {"expires": 60, "headers": {"x": 1}},
    {"args": ({"deep": [1, 2]},)},
    {"serializer": "pickle"},
    {"compression": "zlib"},
    {"shadow": "other", "reply_to": "me"},
    {"retry": False},
    {"retry_policy": {"max_retries": 1}},
]


def work(a: Any = 0, *args: Any, **kwargs: Any) -> None: ...


@pytest.fixture
def app(make_app: MakeApp) -> Any:
    app: Any = make_app(
        dq_buffer=False,
        task_queues=[
            Queue("celery"),
            Queue("push", Exchange("push"), routing_key="push"),
            Queue("fanned", Exchange("fanned", type="topic"), routing_key="#"),
        ],
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0},
    )
    app.task(name="plain", shared=False)(work)
    app.task(name="owned", shared=False, tenant="{a}-x")(work)
    return app


def stored_as(stored: Stored, options: dict[str, Any], task_id: str) -> Any:
    """Return a stored message without the parts that differ in each message."""
    queue = options.get("queue", "celery")
    record = stored.record(getattr(queue, "name", queue), task_id)
    text = record.envelope.replace(task_id.encode(), b"ID")
    for moment in ("eta", "expires"):
        at = text.find(f'"{moment}":"'.encode())
        if at >= 0:
            end = text.index(b'"', at + len(moment) + 4)
            text = text[:at] + text[end:]
    return record._replace(envelope=text, due_us=record.due_us > 0, expires_us=record.expires_us > 0)


@pytest.mark.parametrize("name", ["plain", "owned"])
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_the_message_is_celerys(app: Any, stored: Stored, name: str, options: dict[str, Any]) -> None:
    task = app.tasks[name]
    with app.producer_pool.acquire(block=True) as producer:
        celerys = task.apply_async(producer=producer, **options).id
    wanted = stored_as(stored, options, celerys)
    for _ in range(3):
        result = task.apply_async(**options)
        assert type(result) is app.AsyncResult
        assert result.ignored == options.get("ignore_result", False)
        assert stored_as(stored, options, result.id) == wanted


def test_plain_calls_go_quickly_and_others_do_not(app: Any, quick: list[Any], stored: Stored) -> None:
    task = app.tasks["owned"]
    for number in range(5):
        task.delay(number)
    assert len(quick) == 4
    assert app.dq.queues["celery"].depth == 5
    task.apply_async((1,), countdown=60)
    task.apply_async((1,), retry=False)
    task.apply_async((1,), link=app.tasks["plain"].si())
    task.apply_async(([1],))
    assert len(quick) == 4
    assert app.send_task("owned", (3,)).id != app.send_task("owned", (3,), task_id="mine").id == "mine"
    assert stored.record("celery", "mine").tenant == "3-x"


def test_receivers_of_signals_see_every_call(app: Any, quick: list[Any]) -> None:
    seen = []

    def receiver(sender: Any = None, headers: Any = None, **_: Any) -> None:
        seen.append(headers["id"])

    received = (signals.before_task_publish, signals.after_task_publish)
    # Celery's sender keeps its list of receivers. Dead receivers of other tests are removed by making a new
    # list, so this must happen before.
    gc.collect()
    for signal in received:
        signal.connect(receiver)
        signal.disconnect(receiver)
    task = app.tasks["plain"]
    ids = [task.delay().id for _ in range(2)]
    for signal in received:
        signal.connect(receiver)
        try:
            ids = [task.delay().id for _ in range(2)]
        finally:
            signal.disconnect(receiver)
        assert seen == ids
        seen.clear()
    assert len(quick) == 1 + 2 * len(received)


def test_a_subclass_of_task_keeps_its_report(app: Any) -> None:
    def apply_async(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return Task.apply_async(self, (*(args or ()), "loud"), kwargs, **options)

    loud = type("Loud", (Task,), {"apply_async": apply_async})

    task = app.task(name="loud", shared=False, base=loud)(work)
    ids = [task.delay(1).id for _ in range(3)]
    messages = {message.id: message for message in app.dq.queues["celery"].peek(limit=10)}
    assert [messages[each].args for each in ids] == ["(1, 'loud')"] * 3
