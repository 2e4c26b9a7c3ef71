"""A call whose answer is lost is sent again with the same sequence, so it is stored once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_dq.dedup.machine import Verdict
from celery_dq.testing.servers import RedisServer
from tests.broker.proxy import Proxy
from tests.producer.conftest import MakeApp, Stored

MARK = "look-for-this"
POLICY = {"max_retries": 5, "interval_start": 0, "interval_step": 0.01}


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def app(make_app: MakeApp, proxy: Proxy, dq_url: str, redis_server: RedisServer) -> Any:
    app: Any = make_app(
        dq_url.replace(f":{redis_server.port}/", f":{proxy.port}/"),
        dq_buffer=False,
        task_publish_retry_policy=POLICY,
    )

    def work(a: Any = 0) -> None: ...

    app.task(name="plain", shared=False)(work)
    app.task(name="keyed", shared=False, dedup={"key": "{a}"})(work)
    return app


@pytest.mark.parametrize("name", ["plain", "keyed"])
def test_a_quick_publish_that_is_repeated_is_stored_once(
    app: Any, proxy: Proxy, stored: Stored, quick: list[Any], name: str
) -> None:
    task = app.tasks[name]
    first = [task.delay(number).id for number in range(3)]
    proxy.drop_answers_to, proxy.drops_left = MARK.encode(), 2
    result = task.delay(MARK)
    assert (proxy.dropped, quick[-1] is result) == (2, True)
    last = task.delay("last").id
    assert stored.ids("celery") == [*first, result.id, last]
    if name == "keyed":
        assert (result.verdict, result.covering) == (Verdict.ACCEPT, result.id)


@pytest.mark.parametrize("buffered_before", [True, False], ids=["template", "Celery's way"])
def test_a_batch_of_the_buffer_that_is_repeated_is_stored_once(
    app: Any, proxy: Proxy, stored: Stored, buffered_before: bool
) -> None:
    task = app.tasks["plain"]
    first = [task.apply_async((number,), buffered=True).id for number in range(3 * buffered_before)]
    assert app.dq.buffer.flush(30) == 0
    proxy.drop_answers_to, proxy.drops_left = MARK.encode(), 2
    ids = [task.apply_async((value,), buffered=True).id for value in (1, MARK, 2)]
    assert app.dq.buffer.flush(30) == 0
    assert proxy.dropped == 2
    assert stored.ids("celery") == [*first, *ids]
