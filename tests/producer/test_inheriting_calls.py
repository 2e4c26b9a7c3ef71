"""The tenants of calls that a running task makes, with ``dq_inherit_tenant``, as the broker stores them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import schedule
from celery.worker.request import Request

from celery_dq import AnyOf
from celery_dq.errors import InvalidTenant
from celery_dq.keys import PartitionKeys
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.redis.store.home import id_start
from tests.apps import task
from tests.producer.conftest import MakeApp, Stored

SET = AnyOf("gpu-1", "gpu-2")


@pytest.fixture
def make_shop(make_app: MakeApp) -> Callable[..., Any]:
    """Make an app with the tasks `child` and `parent`, which runs what the test puts into ``app.work``."""

    def make(broker: str | None = None, **conf: Any) -> Any:
        app: Any = make_app(*([broker] if broker else []), **{"dq_inherit_tenant": True, **conf})
        app.conf.task_routes = {"child": "push"}

        @task(app, name="child")
        def child(*args: Any) -> None: ...

        @task(app, name="parent")
        def parent() -> None:
            app.work()

        return app

    return make


def run(app: Any, work: Callable[[], Any], **options: Any) -> None:
    """Call the parent, and run it in this process, as a worker without a pool would."""
    app.work = work
    app.send_task("parent", buffered=False, **options)
    run_next(app)


def run_next(app: Any) -> None:
    """Run the next message of the default queue in this process."""
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        message = channel.message_to_python(channel.basic_get(app.conf.task_default_queue, no_ack=True))
        Request(message, app=app, body=message.body, headers=message.headers, decoded=False).execute()


def tenants(app: Any, stored: Stored) -> list[str]:
    """Return the tenants of the messages in the queue of the children."""
    assert app.dq.buffer.flush(30) == 0
    return sorted(stored.record("push", task_id).tenant for task_id in stored.ids("push"))


@pytest.mark.parametrize("inherits", [True, False])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_call_inherits_with_the_setting_only(
    make_shop: Callable[..., Any], stored: Stored, inherits: bool, buffered: bool
) -> None:
    app = make_shop(dq_inherit_tenant=inherits, dq_buffer_in_workers=True, dq_buffer=buffered)
    child = app.tasks["child"]

    def work() -> None:
        child.delay()
        app.send_task("child")
        child.s().apply_async()

    run(app, work, tenant="a")
    assert app.dq.buffer.inspect().counters.get("accepted", 0) == (3 if buffered else 0)
    assert tenants(app, stored) == ["a" if inherits else ""] * 3


def test_the_explanation_of_a_call_names_an_inherited_tenant(
    make_shop: Callable[..., Any], stored: Stored
) -> None:
    app = make_shop(dq_buffer=False)
    child = app.tasks["child"]

    def work() -> None:
        child.apply_async(task_id="inherited")
        child.apply_async(task_id="named", tenant="a")

    run(app, work, tenant="a")
    sentences = {name: app.dq.explain(task_id=name).sentence for name in ("inherited", "named")}
    assert sentences["inherited"].endswith(" Its tenant is that of the task that called it.")
    assert "called it" not in sentences["named"]


def test_no_call_outside_of_a_task_inherits(
    make_shop: Callable[..., Any], stored: Stored, quick: list[Any]
) -> None:
    app = make_shop()
    child = app.tasks["child"]
    run(app, child.delay, tenant="a")
    by_template = [child.delay() for _ in range(3)][1:]
    run(app, child.delay, tenant="b")
    assert quick[:2] == by_template
    assert tenants(app, stored) == ["", "", "", "a", "b"]


def test_beat_inherits_nothing_and_its_tasks_do(make_shop: Callable[..., Any], stored: Stored) -> None:
    app = make_shop(dq_buffer=False)
    app.work = app.tasks["child"].delay
    for options in ({}, {"tenant": "a"}):
        entry = ScheduleEntry(name="x", task="parent", schedule=schedule(10), options=options, app=app)
        Scheduler(app, lazy=True).apply_async(entry, advance=False)
        run_next(app)
    assert tenants(app, stored) == ["", "a"]


def test_the_polls_of_a_chord_inherit_no_tenant(
    make_shop: Callable[..., Any], stored: Stored, tmp_path: Path
) -> None:
    app = make_shop(result_backend=f"file://{tmp_path}", dq_buffer=False)
    child = app.tasks["child"]
    run(app, lambda: chord([child.si(), child.si()])(child.si()), tenant="a")
    records = map(MessageRecord.unpack, stored.client.hvals(PartitionKeys("online", "push").messages))
    found = sorted((record.task, record.tenant) for record in records)
    assert found == [("celery.chord_unlock", ""), ("child", "a"), ("child", "a")]


@pytest.mark.parametrize("buffered", [True, False])
def test_the_id_of_a_call_names_the_inherited_tenant(
    make_shop: Callable[..., Any], stored: Stored, buffered: bool
) -> None:
    queues = {"push": {"partitions": 4}}
    app = make_shop(dq_queues=queues, dq_buffer_in_workers=True, dq_buffer=buffered)
    results: list[Any] = []
    for tenant in ("a", "b"):
        run(app, lambda: results.append(app.tasks["child"].delay()), tenant=tenant)
    assert app.dq.buffer.flush(30) == 0
    assert [result.id.startswith(id_start(tenant)) for result, tenant in zip(results, "ab", strict=True)]
    assert [app.dq.find(result.id)[0].tenant for result in results] == ["a", "b"]


def test_a_call_of_a_task_of_resources_inherits_the_set(
    make_shop: Callable[..., Any], stored: Stored
) -> None:
    app = make_shop(dq_queues={"spread": {"partitions": 4}})
    child = app.tasks["child"]
    refused: list[Exception] = []

    def work() -> None:
        child.delay()
        try:
            child.apply_async(queue="spread")
        except InvalidTenant as error:
            refused.append(error)

    run(app, work, tenant=SET)
    assert tenants(app, stored) == [SET]
    assert len(refused) == 1


@pytest.mark.parametrize("inherits", [True, False])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_call_inherits_the_priority_by_the_setting_of_celery(
    make_shop: Callable[..., Any], stored: Stored, inherits: bool, buffered: bool
) -> None:
    app = make_shop(
        dq_inherit_tenant=False,
        task_inherit_parent_priority=inherits,
        dq_buffer_in_workers=True,
        dq_buffer=buffered,
    )
    child = app.tasks["child"]

    def work() -> None:
        child.delay()
        child.apply_async(link=child.si())
        child.apply_async(priority=2)

    run(app, work, priority=7, link=child.si())
    assert app.dq.buffer.flush(30) == 0
    found = sorted(stored.record("push", task_id).priority for task_id in stored.ids("push"))
    assert found == ([2, 7, 7, 7] if inherits else [0, 0, 0, 2])


def test_a_broker_without_tenants_gets_messages_as_before(
    make_shop: Callable[..., Any], redis_url: str
) -> None:
    app = make_shop(redis_url, dq_buffer=False)
    app.conf.task_routes = {}
    run(app, app.tasks["child"].delay, tenant="a")
    with app.connection_for_read() as connection:
        message = connection.default_channel.basic_get("celery", no_ack=True)
    assert "tenant" not in message.properties
