"""The tenant of a message from a task, a call, a retry and beat, of an app that was set up."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, shared_task
from celery.app.amqp import AMQP
from celery.app.control import Control
from celery.signals import before_task_publish
from celery.worker.request import Request

import celery_dq
from celery_dq.errors import ConfigurationError, InvalidPriority, InvalidTenant
from celery_dq.wiring import setup
from tests.apps import task


@pytest.fixture
def app() -> Iterator[Any]:
    with Celery("shop", broker="memory://", set_as_current=False) as app:
        app.conf.task_default_queue = uuid4().hex  # the memory broker outlives the test
        yield setup(app)


@pytest.fixture
def published() -> Iterator[list[dict[str, Any]]]:
    """Record the properties of each message that Celery publishes."""
    seen: list[dict[str, Any]] = []

    def note(properties: dict[str, Any], headers: dict[str, Any], **_: Any) -> None:
        seen.append({**properties, "id": headers["id"]})

    before_task_publish.connect(note)
    yield seen
    before_task_publish.disconnect(note)


def nothing() -> None:
    """A task for apps without their own tasks."""


def test_setup_is_idempotent_and_reads_nothing(app: Any) -> None:
    control, amqp, dq, steps = (
        app.control_cls,
        app.amqp_cls,
        app.dq,
        {k: set(v) for k, v in app.steps.items()},
    )
    assert celery_dq.setup(app) is app
    assert (app.control_cls, app.amqp_cls, app.dq) == (control, amqp, dq)
    assert app.steps == steps
    assert not app.configured


def test_a_template_names_the_tenant(app: Any, published: list[dict[str, Any]]) -> None:
    @task(app, name="notify", tenant="{merchant_id}")
    def notify(merchant_id: int, order: int = 0) -> None: ...

    @task(app, name="bound", bind=True, tenant="{merchant_id}")
    def bound(self: Any, merchant_id: int) -> None: ...

    @task(app, name="again", autoretry_for=(KeyError,), tenant="{merchant_id}")
    def again(merchant_id: int) -> None: ...

    notify.delay(42)
    notify.apply_async(kwargs={"merchant_id": "m"})
    notify.s(order=1).apply_async((7,))
    bound.delay(8)
    again.delay(9)
    assert [message["tenant"] for message in published] == ["42", "m", "7", "8", "9"]


def test_a_callable_names_the_tenant(app: Any, published: list[dict[str, Any]]) -> None:
    @task(app, name="f", tenant=lambda args, kwargs: f"m{args[0]}")
    def f(merchant_id: int) -> None: ...

    class Base(app.Task):  # type: ignore[misc]  # of a type that is known at runtime only
        def tenant(self, args: Any, kwargs: Any) -> str:
            return f"{self.name}/{args[0]}"

    @task(app, name="g", base=Base)
    def g(merchant_id: int) -> None: ...

    @task(app, name="h", tenant=lambda args, kwargs: None)
    def h() -> None: ...

    f.delay(1)
    g.delay(2)
    h.delay()
    assert [message.get("tenant") for message in published] == ["m1", "g/2", None]


def test_the_call_wins_over_the_task(app: Any, published: list[dict[str, Any]]) -> None:
    @task(app, name="notify", tenant="{merchant_id}")
    def notify(merchant_id: int) -> None: ...

    notify.apply_async((1,), tenant="vip")
    notify.apply_async((1,), tenant=5, priority=9)
    notify.apply_async((1,), tenant="")
    notify.s(1).set(tenant="signed").apply_async()
    assert [message.get("tenant") for message in published] == ["vip", "5", None, "signed"]
    assert published[1]["priority"] == 9


def test_send_task_by_name_obeys_too(app: Any, published: list[dict[str, Any]]) -> None:
    @task(app, name="notify", tenant="{merchant_id}")
    def notify(merchant_id: int) -> None: ...

    app.send_task("notify", (3,))
    app.send_task("elsewhere", tenant="vip")
    app.send_task("elsewhere")
    assert [message.get("tenant") for message in published] == ["3", "vip", None]


def test_task_routes_may_name_a_tenant(app: Any, published: list[dict[str, Any]]) -> None:
    app.conf.task_routes = {"batch.*": {"queue": "batch", "tenant": "night"}}
    app.send_task("batch.run")
    assert published[0]["tenant"] == "night"


def test_beat_names_the_tenant(app: Any, published: list[dict[str, Any]]) -> None:
    from celery.beat import ScheduleEntry, Scheduler
    from celery.schedules import schedule

    @task(app, name="notify", tenant="{merchant_id}")
    def notify(merchant_id: int) -> None: ...

    scheduler = Scheduler(app, lazy=True)
    for name, options in (("notify", {}), ("elsewhere", {"tenant": "vip"})):
        entry = ScheduleEntry(name="x", task=name, schedule=schedule(10), args=(4,), options=options, app=app)
        scheduler.apply_async(entry, advance=False)
    assert [message["tenant"] for message in published] == ["4", "vip"]


def test_two_apps_with_one_task_name_keep_their_own_rules(app: Any, published: list[dict[str, Any]]) -> None:
    with Celery("other", broker="memory://", set_as_current=False) as plain:
        other = Celery("third", broker="memory://", set_as_current=False)
        setup(other)
        app.task(shared=False, name="f", tenant="first")(nothing).delay()
        other.task(shared=False, name="f", tenant="third")(nothing).delay()
        plain.task(shared=False, name="f", tenant="none")(nothing).delay()
        other.close()
    assert [message.get("tenant") for message in published] == ["first", "third", None]


def test_a_shared_task_names_its_tenant_in_every_app(app: Any, published: list[dict[str, Any]]) -> None:
    def notify(merchant_id: int) -> None: ...

    share: Any = shared_task
    share(name="shared.notify", tenant="{merchant_id}")(notify)
    app.send_task("shared.notify", (6,))
    assert published[0]["tenant"] == "6"


def test_a_retry_keeps_the_tenant_and_a_subtask_does_not_inherit_it(
    app: Any, published: list[dict[str, Any]]
) -> None:
    @task(app, name="child")
    def child() -> None: ...

    @task(app, name="parent", bind=True)
    def parent(self: Any, tenant: str | None = None) -> None:
        child.delay()
        raise self.retry(countdown=1, **({"tenant": tenant} if tenant else {}))

    for args in ((), ("moved",)):
        parent.apply_async(args, tenant="vip")
        run_next(app)
        app.control.purge()
    assert [message.get("tenant") for message in published] == ["vip", None, "vip", "vip", None, "moved"]
    assert published[0]["id"] == published[2]["id"]


def run_next(app: Any) -> None:
    """Take one message from the broker and run its task, as a worker without a pool would."""
    with app.connection_for_read() as connection:
        message = None
        while message is None or message.headers["task"] != "parent":
            message = connection.default_channel.basic_get(app.conf.task_default_queue, no_ack=True)
        message = connection.default_channel.message_to_python(message)
        Request(message, app=app, body=message.body, headers=message.headers, decoded=False).execute()


@pytest.mark.parametrize(
    ("options", "error", "lesson"),
    [
        ({"tenant": "a\nb"}, InvalidTenant, "notify: tenant: 'a\\\\nb' holds control characters"),
        ({"tenant": "x" * 256}, InvalidTenant, "256 bytes"),
        ({"tenant": 1.5}, InvalidTenant, "float"),
        ({"priority": 10}, InvalidPriority, "notify: priority: 10"),
        ({"priority": "high"}, InvalidPriority, "0 to 9"),
    ],
)
def test_bad_options_raise_in_the_caller(
    app: Any, published: Any, options: Any, error: Any, lesson: str
) -> None:
    @task(app, name="notify")
    def notify() -> None: ...

    with pytest.raises(error, match=lesson):
        notify.apply_async(**options)
    with pytest.raises(error, match=lesson):
        app.send_task("notify", **options)
    assert published == []


def test_a_template_that_names_an_unknown_argument_raises_at_the_first_call(app: Any, published: Any) -> None:
    @task(app, name="notify", tenant="{merchant}")
    def notify(merchant_id: int) -> None: ...

    with pytest.raises(ConfigurationError, match="notify.*'{merchant}'.*take: merchant_id"):
        notify.delay(1)
    assert published == []


def test_task_protocol_1_is_served(app: Any) -> None:
    app.conf.task_protocol = 1

    @task(app, name="notify", tenant="{merchant_id}")
    def notify(merchant_id: int) -> None: ...

    notify.delay(5)
    with app.connection_for_read() as connection:
        assert (
            connection.default_channel.basic_get(app.conf.task_default_queue, no_ack=True).properties[
                "tenant"
            ]
            == "5"
        )


class OwnControl(Control):
    """A user's own class."""

    def hello(self) -> str:
        return "hello"


class OwnAMQP(AMQP):
    """A user's own class."""


def test_the_users_own_classes_stay(app: Any) -> None:
    with Celery("own", broker="memory://", control=OwnControl, amqp=OwnAMQP, set_as_current=False) as own:
        setup(own)
        assert isinstance(own.control, OwnControl)
        assert own.control.hello() == "hello"
        assert isinstance(own.amqp, OwnAMQP)


def test_parts_that_were_made_before_setup_are_mended(published: list[dict[str, Any]]) -> None:
    with Celery("late", broker="memory://", set_as_current=False) as late:
        notify = late.task(shared=False, name="notify", tenant="vip")(nothing)
        notify.delay()
        control = late.control
        setup(late)
        notify.delay()
        assert late.control is control
        assert [message.get("tenant") for message in published] == [None, "vip"]


def test_an_app_survives_pickling(app: Any, published: list[dict[str, Any]]) -> None:
    copy = pickle.loads(pickle.dumps(app))
    copy.task(shared=False, name="notify", tenant="vip")(nothing).delay()
    assert published[0]["tenant"] == "vip"
    copy.close()
