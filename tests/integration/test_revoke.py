"""Tenants and revokes on a running worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
import redis
from celery import Celery
from celery.bin.base import CLIContext
from celery.bin.control import control
from celery.contrib.testing.worker import start_worker
from celery.result import AsyncResult
from click.testing import CliRunner

import celery_dq
from celery_dq.errors import InvalidRequest
from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until


@pytest.fixture
def app(broker_url: str, redis_url: str) -> Iterator[Any]:
    """An app with results, whose tasks have a tenant."""
    with Celery("shop", broker=broker_url, backend=redis_url, set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.update(task_default_queue="push", broker_connection_retry_on_startup=True)

        @app.task(shared=False, name="child", bind=True)
        def child(self: Any) -> Any:
            return self.request.properties.get("tenant")

        @app.task(shared=False, name="whose", bind=True, tenant="{merchant}", default_retry_delay=0)
        def whose(self: Any, merchant: Any, retries: int = 0) -> Any:
            if self.request.retries < retries:
                raise self.retry(args=("another", retries), kwargs={}, countdown=0)
            return [self.request.properties.get("tenant"), child.delay().id]

        yield app
        producers: Any = app.pool
        producers.force_close_all()


@pytest.fixture
def worker(app: Any) -> Iterator[Any]:
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20) as worker:
        yield worker


def test_a_retry_keeps_its_tenant_and_a_subtask_has_none(app: Any, worker: Any) -> None:
    tenant, child = app.tasks["whose"].delay(42, retries=2).get(timeout=30)
    assert tenant == "42"
    assert app.AsyncResult(child).get(timeout=30) is None


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml", "msgpack"])
def test_a_task_that_was_revoked_or_expired_before_any_worker_started_is_recorded_as_revoked(
    app: Any, serializer: str
) -> None:
    app.conf.update(task_serializer=serializer, accept_content=["json", serializer])
    waiting: AsyncResult[Any] = app.tasks["whose"].delay(1)
    expired: AsyncResult[Any] = app.tasks["whose"].apply_async((1,), expires=-1)
    delayed: AsyncResult[Any] = app.tasks["whose"].apply_async((1,), countdown=1000)
    waiting.revoke()
    delayed.revoke()
    app.control.revoke("published-later")
    later = app.tasks["whose"].apply_async((1,), task_id="published-later")
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20):
        for result in (waiting, expired, delayed, later):
            wait_until(lambda: result.state == "REVOKED", 30, what=lambda: result.state)  # noqa: B023 - called at once
    assert app.dq.queues["push"].depth == 0
    assert app.dq.dead_letters["push"].list() == []


@pytest.mark.parametrize("command", [("revoke",), ("terminate", "SIGTERM")])
def test_celery_control_cancels_the_message_without_a_worker(app: Any, command: tuple[str, ...]) -> None:
    waiting = app.tasks["whose"].delay(1)
    words = [*command, waiting.id, "published-later", "--timeout", "0.05"]
    context = CLIContext(app=app, no_color=True, workdir=None)
    result = CliRunner().invoke(control, words, obj=context)
    assert "No nodes replied" in result.output
    assert app.dq.queues["push"].find(waiting.id).state == "discarded"
    assert app.dq.queues["push"].find("published-later").state == "cancelled"


def test_a_revoke_for_some_workers_leaves_the_message(app: Any) -> None:
    waiting = app.tasks["whose"].delay(1)
    app.control.revoke(waiting.id, destination=["celery@elsewhere"])
    app.control.broadcast("revoke", task_id=waiting.id, pattern="celery@else*", matcher="glob")
    by_position = (None, None, False, 1.0, None, None, None, "celery@else*", "glob")
    app.control.broadcast("revoke", {"task_id": waiting.id}, *by_position)
    assert app.dq.queues["push"].find(waiting.id).state == "waiting"


@pytest.mark.parametrize("given", [UUID(int=1), 5, ["x", UUID(int=1)]])
def test_a_revoke_by_an_id_that_is_no_text_is_refused(app: Any, given: Any) -> None:
    with pytest.raises(InvalidRequest, match="task_id = .*: give a text"):
        app.control.revoke(given)


def test_inspect_reports_the_brokers_options(app: Any, worker: Any) -> None:
    stats = app.control.inspect(timeout=30, limit=1).stats()
    (reported,) = stats.values()
    assert "shop" in str(reported["broker"]["transport_options"])


@pytest.mark.parametrize(("setting", "seconds"), [({}, 3 * 3600), ({"dq_tombstone_ttl": "20m"}, 1200)])
def test_a_revoke_of_a_task_that_has_not_arrived_lasts_as_long_as_the_setting(
    app: Any, redis_url: str, setting: dict[str, str], seconds: int
) -> None:
    app.conf.update(setting)
    app.tasks["whose"].delay(1)  # the queue exists
    app.dq.revoke(["revoked"])
    app.dq.queues["push"].cancel("cancelled")
    with redis.Redis.from_url(redis_url) as client:
        ends: Any = client.zrange(PartitionKeys("online", "push").tombstones, 0, -1, withscores=True)
        now_s = client.time()[0]
    assert [name for name, _ in ends] == [b"revoked", b"cancelled"]
    for _, end_us in ends:
        assert seconds - 30 < end_us / 1e6 - now_s <= seconds + 1
