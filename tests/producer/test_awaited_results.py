"""Awaited results: by PUB/SUB on Redis, on few connections, and as ``get()`` returns or raises them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery, chain, group, states
from celery.exceptions import TaskRevokedError, TimeoutError as ResultTimeout
from celery.result import AsyncResult
from kombu.exceptions import DecodeError

import celery_dq
from celery_dq.app.publishing import awaited_results
from celery_dq.testing.waiting import wait_until
from tests.broker.proxy import Proxy
from tests.producer.conftest import MakeApp
from tests.producer.test_awaited_calls import notify_of, run, until


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


@pytest.fixture
def app(make_app: MakeApp, redis_url: str) -> Any:
    return make_app(dq_buffer=False, result_backend=redis_url)


def subscribed(app: Any, client: Any, task_id: str) -> bool:
    return bool(client.pubsub_numsub(app.backend.get_key_for_task(task_id))[0][1])


def test_a_result_arrives_when_the_task_ends(app: Any, client: Any) -> None:
    made = notify_of(app)

    async def calls() -> None:
        result = await made.adelay()
        awaited = asyncio.create_task(result.aget(timeout=30))
        await until(lambda: subscribed(app, client, result.id))
        app.backend.store_result(result.id, None, states.STARTED)
        app.backend.store_result(result.id, {"sum": 5}, states.SUCCESS)
        assert await awaited == {"sum": 5}
        assert (result.state, result.get()) == (states.SUCCESS, {"sum": 5})
        # A result that is stored already, by objects of the app and of Celery.
        assert await app.AsyncResult(result.id).aget(timeout=30) == {"sum": 5}
        celerys: Any = AsyncResult(result.id, app=app)
        assert await celerys.aget(timeout=30, interval=0.1) == {"sum": 5}
        await until(lambda: not subscribed(app, client, result.id))

    run(calls())


def test_a_failed_task_raises_its_exception_or_returns_it(app: Any) -> None:
    app.backend.store_result("failed", KeyError("sku"), states.FAILURE)
    app.backend.store_result("revoked", TaskRevokedError("revoked"), states.REVOKED)

    async def calls() -> None:
        with pytest.raises(KeyError, match="sku"):
            await app.AsyncResult("failed").aget(timeout=30)
        value = await app.AsyncResult("failed").aget(timeout=30, propagate=False)
        assert type(value) is KeyError
        with pytest.raises(TaskRevokedError, match="revoked"):
            await app.AsyncResult("revoked").aget(timeout=30)

    run(calls())


def test_a_result_that_is_known_is_not_awaited_again(app: Any, client: Any) -> None:
    async def calls() -> None:
        app.backend.store_result("known", 3, states.SUCCESS)
        app.backend.store_result("failed", KeyError("sku"), states.FAILURE)
        known, failed = app.AsyncResult("known"), app.AsyncResult("failed")
        assert await known.aget(timeout=30) == 3
        with pytest.raises(KeyError, match="sku"):
            await failed.aget(timeout=30)
        client.flushdb()  # as when the results expire
        assert await known.aget(timeout=5) == 3
        with pytest.raises(KeyError, match="sku"):
            await failed.aget(timeout=5)

    run(calls())


@pytest.mark.parametrize("first", ["task", "group"])
def test_a_revoked_task_before_it_is_the_error_of_a_result(app: Any, first: str) -> None:
    """An expired task of a chain leaves its state in no later result."""
    made = notify_of(app)
    calls: Any = chain(group(made.si(), made.si()) if first == "group" else made.si() | made.si(), made.si())

    async def awaits() -> None:
        result = await calls.aapply_async()
        awaited = asyncio.create_task(result.aget(timeout=30))
        revoked = result.parent.results[1] if first == "group" else result.parent.parent
        app.backend.store_result(revoked.id, TaskRevokedError("expired"), states.REVOKED)
        with pytest.raises(TaskRevokedError):
            await awaited
        with pytest.raises(ResultTimeout):
            await result.aget(timeout=0.2, follow_parents=False)

    run(awaits())


def test_a_task_that_does_not_end_in_time_is_a_timeout(app: Any, client: Any) -> None:
    async def calls() -> None:
        with pytest.raises(ResultTimeout, match="timed out"):
            await app.AsyncResult("late").aget(timeout=0.05)
        awaited = asyncio.create_task(app.AsyncResult("cancelled").aget())
        await until(lambda: subscribed(app, client, "cancelled"))
        awaited.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaited
        await until(lambda: not subscribed(app, client, "cancelled"))
        app.backend.store_result("other", 3, states.SUCCESS)
        assert await app.AsyncResult("other").aget(timeout=30) == 3

    run(calls())


def test_many_results_share_few_connections_that_end_with_the_loop(app: Any, client: Any) -> None:
    ids = [f"id-{number}" for number in range(200)]

    async def calls() -> None:
        results = [app.AsyncResult(each) for each in ids for _ in range(2)]
        awaited = asyncio.gather(*(each.aget(timeout=50) for each in results))
        await until(lambda: all(subscribed(app, client, each) for each in ids))
        for number, each in enumerate(ids):
            app.backend.store_result(each, number, states.SUCCESS)
        assert len(client.client_list()) <= before + 12
        assert await awaited == [number for number in range(200) for _ in range(2)]

    app.backend.store_result("first", 0, states.SUCCESS)
    before = len(client.client_list())
    for _ in range(2):
        run(calls())
        wait_until(lambda: len(client.client_list()) <= before, 30)
        client.flushdb()


def test_a_result_arrives_over_a_connection_that_was_cut(
    make_app: MakeApp, proxy: Proxy, redis_url: str, client: Any
) -> None:
    app = make_app(dq_buffer=False, result_backend=proxy.redis_url(redis_url))
    writer = make_app(dq_buffer=False, result_backend=redis_url)

    async def calls() -> None:
        result: Any = app.AsyncResult("cut")
        awaited = asyncio.create_task(result.aget(timeout=50))
        for _ in range(3):
            await until(lambda: subscribed(app, client, "cut"))
            proxy.cut_all()
            await until(lambda: not subscribed(app, client, "cut"))
        writer.backend.store_result("cut", 4, states.SUCCESS)
        assert await awaited == 4

    run(calls())


def test_a_result_that_cannot_be_read_fails_alone(app: Any, client: Any) -> None:
    async def calls() -> None:
        bad, good = (asyncio.create_task(app.AsyncResult(each).aget(timeout=30)) for each in ("bad", "good"))
        await until(lambda: subscribed(app, client, "bad") and subscribed(app, client, "good"))
        client.publish(app.backend.get_key_for_task("bad"), b"no JSON")
        with pytest.raises(DecodeError):
            await bad
        await asyncio.sleep(0.05)
        app.backend.store_result("good", 3, states.SUCCESS)
        assert await good == 3

    run(calls())


def test_a_result_arrives_after_more_cuts_than_attempts_in_a_row(
    app: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited_results, "ATTEMPTS", 3)

    async def calls() -> None:
        awaited = asyncio.create_task(app.AsyncResult("cut").aget(timeout=50))
        for _ in range(4):
            await until(lambda: subscribed(app, client, "cut"))
            await asyncio.sleep(0.1)  # for the read of the state that is stored
            client.client_kill_filter(_type="pubsub")
        app.backend.store_result("cut", 4, states.SUCCESS)
        assert await awaited == 4

    run(calls())


def test_results_whose_connection_is_cut_while_others_subscribe_arrive(app: Any, client: Any) -> None:
    ids = [f"id-{number}" for number in range(400)]

    async def cuts() -> None:
        for _ in range(8):
            await asyncio.to_thread(client.client_kill_filter, _type="pubsub")
            await asyncio.sleep(0.01)

    async def calls() -> None:
        cutting = asyncio.create_task(cuts())
        awaited = []
        for number, each in enumerate(ids):
            awaited.append(asyncio.create_task(app.AsyncResult(each).aget(timeout=50)))
            if number % 20 == 0:
                await asyncio.sleep(0.01)
        await cutting
        for number, each in enumerate(ids):
            app.backend.store_result(each, number, states.SUCCESS)
        assert await asyncio.gather(*awaited) == [*range(400)]

    run(calls())


def test_results_arrive_after_all_other_tasks_of_the_loop_were_cancelled(app: Any, client: Any) -> None:
    async def calls() -> None:
        awaited = asyncio.create_task(app.AsyncResult("kept").aget(timeout=20))
        await until(lambda: subscribed(app, client, "kept"))
        others = asyncio.all_tasks() - {asyncio.current_task(), awaited}
        for each in others:
            each.cancel()
        await asyncio.wait(others)
        app.backend.store_result("kept", 3, states.SUCCESS)
        assert await awaited == 3

    run(calls())


def test_another_backend_is_read_in_a_thread() -> None:
    app: Any = celery_dq.setup(
        Celery("other", broker="memory://", backend="cache+memory://", set_as_current=False)
    )
    app.backend.store_result("stored", 5, states.SUCCESS)
    assert run(app.AsyncResult("stored").aget(timeout=30)) == 5
    with pytest.raises(ResultTimeout):
        run(app.AsyncResult("late").aget(timeout=0.05, interval=0.01))
    app.close()
