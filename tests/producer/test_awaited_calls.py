"""Awaited calls: messages, verdicts, limits and errors of plain calls, without a thread or a blocked loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from celery import Celery, Task, chain, chord, group, signals
from kombu import pools
from kombu.exceptions import OperationalError

import celery_dq
from celery_dq.app.publishing.direct_stage import CircuitBreaker, DirectStage
from celery_dq.dedup.machine import Verdict
from celery_dq.errors import DuplicateCall, TooFewReplicas
from celery_dq.producer.sender import BrokerUnavailable, BufferFull
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.server_errors import BrokerOverloaded
from tests.apps import task
from tests.broker.proxy import Proxy
from tests.producer.conftest import MakeApp, Stored
from tests.producer.test_partitions import give_partitions

DIRECT = {"dq_buffer": False}


def notify(*args: Any, **kwargs: Any) -> Any:
    return args


def notify_of(app: Any, **options: Any) -> Any:
    return task(app, name="notify", **options)(notify)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a new loop; a connection that is left open is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        result = asyncio.run(coroutine)
        gc.collect()
    return result


async def prepared(made: Any) -> None:
    """Make the first calls, which open connections, declare the queue and make a template."""
    for _ in range(4):
        await made.adelay()


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition with the loop running."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def breaker_of(app: Any) -> CircuitBreaker:
    (stage,) = (each for each in app.send_task.stages if isinstance(each, DirectStage))
    return stage.breaker


@pytest.fixture
def direct_app(make_app: MakeApp) -> Any:
    return make_app(**DIRECT)


@pytest.fixture
def patient_app(make_app: MakeApp, proxy: Proxy, dq_url: str) -> Iterator[Any]:
    """An app with a broker behind the proxy, whose calls have time."""
    yield make_app(proxy.url(dq_url), **DIRECT, dq_publish_timeout="60s")
    pools.reset()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"headers": {"trace": "1"}},
        {"tenant": "42"},
        {"priority": 7},
        {"eta": "2200-01-01T00:00:00+00:00"},
        {"expires": "2200-01-01T00:00:00+00:00", "shadow": "other"},
        {"link": "signature", "time_limit": 30},
    ],
    ids=str,
)
def test_an_awaited_call_sends_the_message_of_a_plain_one(
    direct_app: Any, stored: Stored, options: dict[str, Any]
) -> None:
    made = notify_of(direct_app)
    if "link" in options:
        options = {**options, "link": made.s().set(task_id="linked")}

    async def calls() -> None:
        for number in range(4):
            await made.aapply_async((number,), {"a": "b"}, task_id=f"id-{number}", queue="two", **options)

    run(calls())
    for number in range(4):
        made.apply_async((number,), {"a": "b"}, task_id=f"id-{number}", queue="one", **options)
        plain, awaited = (stored.message(queue, f"id-{number}") for queue in ("one", "two"))
        for _, properties, _ in (plain, awaited):
            properties.pop("reply_to")  # of the thread
            properties.pop("expiration", None)  # from now on
        assert awaited == plain
        one, two = (stored.record(queue, f"id-{number}") for queue in ("one", "two"))
        assert one._replace(envelope=b"", expires_us=0) == two._replace(envelope=b"", expires_us=0)


def test_a_thousand_coroutines_publish_a_thousand_messages_in_turns(direct_app: Any, stored: Stored) -> None:
    made, turns = notify_of(direct_app), 0

    async def calls() -> set[str]:
        nonlocal turns
        await prepared(made)
        stored.client.flushdb()
        others = asyncio.gather(*(made.adelay(number) for number in range(1000)))
        while not others.done():
            await asyncio.sleep(0)
            turns += 1
        return {result.id for result in await others}

    ids = run(calls())
    assert sorted(stored.ids("celery")) == sorted(ids)
    assert len(ids) == 1000
    assert turns > 100


def test_a_process_uses_no_more_connections_than_its_limit_and_closes_those_of_a_loop(
    make_app: MakeApp, stored: Stored
) -> None:
    made = notify_of(make_app(**DIRECT, broker_pool_limit=3))

    async def calls() -> int:
        await prepared(made)
        before = len(stored.client.client_list())
        await asyncio.gather(*(made.adelay(number) for number in range(50)))
        return len(stored.client.client_list()) - before

    assert 1 <= run(calls()) <= 3
    after_one = len(stored.client.client_list())
    for _ in range(3):
        run(calls())
    wait_until(lambda: len(stored.client.client_list()) <= after_one, 30)


def test_loops_of_several_threads_publish_at_the_same_time(direct_app: Any, stored: Stored) -> None:
    made, errors = notify_of(direct_app), []

    async def calls() -> None:
        await prepared(made)
        await asyncio.gather(*(made.adelay(number) for number in range(200)))

    def loop() -> None:
        try:
            asyncio.run(calls())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert errors == []
    assert stored.count("celery") == 3 * 204


def test_the_markers_of_loops_that_have_ended_expire_soon(direct_app: Any, stored: Stored) -> None:
    made = notify_of(direct_app)
    for _ in range(3):
        run(prepared(made))
    lives_ms = sorted(stored.client.pttl(key) for key in stored.client.scan_iter("*producer*"))
    assert len(lives_ms) == 4
    # The last one is that of the app's pool, in which the first call was made.
    assert all(0 < each <= 60_000 for each in lives_ms[:3])


# -- dedup


def test_an_awaited_call_gets_the_verdict_and_the_covering_call(direct_app: Any) -> None:
    made = notify_of(direct_app, dedup={"key": "{args}"})
    raising = task(direct_app, name="raising", dedup={"key": "{args}", "on_duplicate": "raise"})(notify)

    async def calls() -> None:
        for number in range(4):  # Celery's way first, a template afterwards
            first = await made.adelay(number)
            assert (first.verdict, first.covering) == (Verdict.ACCEPT, first.id)
            second = await made.adelay(number)
            assert (second.verdict, second.id) == (Verdict.DECLINE, first.id)
            await raising.adelay(number)
            with pytest.raises(DuplicateCall, match="covers this call"):
                await raising.adelay(number)
        assert not hasattr(await made.aapply_async((1,), dedup=False), "verdict")

    run(calls())


# -- the task and its class, signatures, names


class OwnTask(Task):  # type: ignore[type-arg]
    """A task class of a program."""

    abstract = True
    calls = 0

    def apply_async(self, *args: Any, **options: Any) -> Any:
        OwnTask.calls += 1
        return super().apply_async(*args, **options)


def test_each_task_class_signature_and_name_can_be_awaited(direct_app: Any, stored: Stored) -> None:
    own, made = task(direct_app, name="own", base=OwnTask)(notify), notify_of(direct_app)

    async def calls() -> list[str]:
        results = []
        for number in range(3):
            results.append(await own.adelay(number))
            results.append(await made.s(number).aapply_async())
            results.append(await made.s(number).adelay())
            results.append(await direct_app.asend_task("elsewhere", (number,)))
            in_turn: Any = chain(made.si(1), made.si(2))
            results.append(await in_turn.aapply_async())
        return [(each.parent or each).id for each in results]

    ids = run(calls())
    assert OwnTask.calls == 3
    assert sorted(stored.ids("celery")) == sorted(ids)


def test_an_eager_call_runs_in_the_loop_of_its_caller(make_app: MakeApp) -> None:
    app = make_app(**DIRECT, task_always_eager=True)
    threads = []

    def here() -> int:
        threads.append(threading.current_thread())
        return 7

    made = task(app, name="here")(here)

    async def calls() -> int:
        value: int = await (await made.adelay()).aget()
        return value

    assert run(calls()) == 7
    assert threads == [threading.current_thread()]


def test_a_call_of_a_running_task_is_its_child(direct_app: Any, stored: Stored) -> None:
    made = notify_of(direct_app)

    def parent() -> str:
        async def calls() -> str:
            return str((await made.adelay()).id)

        return asyncio.run(calls())

    outer = task(direct_app, name="parent")(parent)
    run(prepared(made))
    applied = outer.apply()
    headers, _, _ = stored.message("celery", applied.get())
    assert headers["parent_id"] == applied.id


def test_a_canvas_that_a_running_task_awaits_has_its_children(
    make_app: MakeApp, stored: Stored, redis_url: str
) -> None:
    app = make_app(**DIRECT, result_backend=redis_url)
    made = notify_of(app)
    plain: Any = Celery("plain", broker=app.conf.broker_url, set_as_current=False)
    plains = task(plain, name="notify")(notify)
    canvases: list[Any] = [
        chain(made.s(), made.s()),
        group(made.s(), made.s()),
        chord([made.s(), made.s()], made.s()),
        plains,
        plains.s(),
    ]

    async def await_all() -> None:
        for each in canvases:
            await each.aapply_async()

    def parent() -> None:
        asyncio.run(await_all())

    outer = task(app, name="parent")(parent)
    run(prepared(made))
    before = stored.ids("celery")
    applied = outer.apply(throw=True)
    headers = [stored.message("celery", each)[0] for each in stored.ids("celery") if each not in before]
    assert [(each["parent_id"], each["root_id"]) for each in headers] == [(applied.id, applied.id)] * 7
    plain.close()


def test_receivers_of_signals_see_an_awaited_call(direct_app: Any, stored: Stored) -> None:
    made = notify_of(direct_app)
    seen: list[tuple[str, str]] = []

    def before(headers: Any, **_: Any) -> None:
        headers["trace"] = "t"
        seen.append(("before", headers["id"]))

    def after(headers: Any, **_: Any) -> None:
        seen.append(("after", headers["id"]))

    run(prepared(made))
    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        results = run(awaiting_all(made, 3))
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    assert seen == [(when, each.id) for each in results for when in ("before", "after")]
    assert {stored.message("celery", each.id)[0]["trace"] for each in results} == {"t"}


async def awaiting_all(made: Any, count: int) -> list[Any]:
    return [await made.adelay(number) for number in range(count)]


def test_another_broker_gets_its_awaited_calls_from_a_thread() -> None:
    app: Any = celery_dq.setup(Celery("other", broker="memory://", set_as_current=False))
    app.conf.task_default_queue = "awaited"
    made = notify_of(app)
    ids = [each.id for each in run(awaiting_all(made, 3))]
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue("awaited")
        assert [queue.get(timeout=5).headers["id"] for _ in ids] == ids
        queue.close()
    app.close()
    pools.reset()


# -- the buffer


def test_a_buffered_call_awaits_room_while_the_loop_runs(
    make_app: MakeApp, proxy: Proxy, dq_url: str, stored: Stored
) -> None:
    app = make_app(
        proxy.url(dq_url), dq_buffer_folder="", dq_buffer_max_messages=5, dq_buffer_max_block="50s"
    )
    made, turns = notify_of(app), 0

    async def calls() -> list[str]:
        nonlocal turns
        await prepared(made)
        await app.dq.buffer.aflush()
        proxy.black_hole.set()
        others = asyncio.gather(*(made.adelay(number) for number in range(20)))
        await until(lambda: len(app.dq.buffer) == 5)
        for _ in range(100):
            await asyncio.sleep(0.001)
            turns += 1
        assert not others.done()
        proxy.black_hole.clear()
        proxy.cut_all()
        return [each.id for each in await others]

    ids = run(calls())
    assert turns == 100
    app.dq.buffer.flush(30)
    assert sorted(stored.ids("celery")[-20:]) == sorted(ids)


def test_a_buffer_that_stays_full_refuses_an_awaited_call(
    make_app: MakeApp, proxy: Proxy, dq_url: str
) -> None:
    app = make_app(
        proxy.url(dq_url), dq_buffer_folder="", dq_buffer_max_messages=5, dq_buffer_max_block="50ms"
    )
    made = notify_of(app)

    async def calls() -> None:
        await prepared(made)
        await app.dq.buffer.aflush()
        proxy.black_hole.set()
        results = await asyncio.gather(*(made.adelay(n) for n in range(8)), return_exceptions=True)
        refused = [each for each in results if isinstance(each, BaseException)]
        assert {type(each) for each in refused} == {BufferFull}
        assert "memory is full" in str(refused[0])

    run(calls())
    proxy.black_hole.clear()
    proxy.cut_all()


# -- cancellation, lost answers


@pytest.mark.parametrize("moment", ["the answer", "the request", "a connection", "a turn"])
def test_a_cancelled_call_is_published_once_or_not_at_all(
    make_app: MakeApp, proxy: Proxy, dq_url: str, stored: Stored, moment: str
) -> None:
    app = make_app(proxy.url(dq_url), **DIRECT, dq_publish_timeout="20s", broker_pool_limit=1)
    made = notify_of(app)

    async def calls() -> set[str]:
        await prepared(made)
        stored.client.flushdb()
        if moment == "the answer":
            proxy.hold_answers_to, proxy.holds_left = b"cancelled", 1
        elif moment == "the request":
            proxy.delay_request = b"cancelled"
        else:
            proxy.hold_answers_to, proxy.holds_left = b"holder", 1
        holder = None
        if moment == "a connection":
            holder = asyncio.create_task(made.aapply_async(task_id="holder"))
            await until(lambda: proxy.held)
        cancelled = asyncio.create_task(made.aapply_async(task_id="cancelled"))
        if moment == "the answer":
            await until(lambda: proxy.held)
        elif moment == "the request":
            await until(lambda: not proxy.delay_request)
        elif moment == "a connection":
            for _ in range(5):
                await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        proxy.release_answers.set()
        proxy.release_request.set()
        others = {each.id for each in await asyncio.gather(*(made.adelay(n) for n in range(20)))}
        return others | {(await holder).id} if holder else others

    sent = run(calls())
    pools.reset()
    ledger = Counter(stored.ids("celery"))
    expected = {"the answer": {1}, "the request": {0, 1}, "a connection": {0}, "a turn": {0}}[moment]
    assert ledger.pop("cancelled", 0) in expected
    assert ledger == Counter(sent)


@pytest.mark.parametrize("call_number", [0, 5], ids=["the first call", "a later call"])
def test_a_call_whose_answer_is_lost_is_published_once(
    patient_app: Any, proxy: Proxy, stored: Stored, call_number: int
) -> None:
    made = notify_of(patient_app)

    async def calls() -> None:
        for number in range(10):
            if number == call_number:
                proxy.drop_answers_to, proxy.drops_left = b"id-", 2
            await made.aapply_async(task_id=f"id-{number}")

    run(calls())
    assert proxy.dropped == 2
    assert Counter(stored.ids("celery")) == Counter(f"id-{number}" for number in range(10))


def test_calls_on_cut_connections_are_published_once(patient_app: Any, proxy: Proxy, stored: Stored) -> None:
    made = notify_of(patient_app)

    async def calls() -> list[str]:
        await prepared(made)
        stored.client.flushdb()
        others = asyncio.gather(*(made.adelay(number) for number in range(300)))
        for _ in range(3):
            await asyncio.sleep(0)
            proxy.cut_all()
        return [each.id for each in await others]

    sent = run(calls())
    assert Counter(stored.ids("celery")) == Counter(sent)


# -- a broker that does not answer, or refuses


def test_a_hung_server_ends_an_awaited_call_like_a_plain_one(make_app: MakeApp) -> None:
    with RedisServer() as server:
        app = make_app(
            server.url(scheme="dq-redis"), **DIRECT, dq_publish_timeout=0.9, dq_breaker_pause="60s"
        )
        made = notify_of(app)

        async def calls() -> None:
            await prepared(made)
            server.pause()
            turns = 0
            late = asyncio.create_task(made.adelay())
            while not late.done():
                await asyncio.sleep(0.01)
                turns += 1
            with pytest.raises(BrokerUnavailable, match="within dq_publish_timeout"):
                await late
            assert turns > 10
            with pytest.raises(BrokerUnavailable, match="has not answered lately"):
                await made.adelay()

        try:
            run(calls())
            assert breaker_of(app).state == "open"
            with pytest.raises(BrokerUnavailable, match="has not answered lately"):
                made.delay()
        finally:
            server.resume()
            app.close()
            pools.reset()


def test_a_broker_that_is_away_refuses_the_first_awaited_calls_too(make_app: MakeApp) -> None:
    with RedisServer() as server:
        url = server.url(scheme="dq-redis")
        app = make_app(
            url, **DIRECT, dq_breaker_failures=2, dq_breaker_pause="20ms", task_publish_retry=False
        )
        made = notify_of(app)

        async def error() -> Any:
            with pytest.raises(OperationalError) as found:
                await made.adelay()
            return type(found.value)

        async def calls() -> None:
            server.kill()
            assert [await error() for _ in range(2)] == [OperationalError] * 2
            server.start()
            await until(lambda: breaker_of(app).state == "half-open")
            await prepared(made)
            assert breaker_of(app).state == "closed"
            server.kill()
            assert [await error() for _ in range(2)] == [OperationalError] * 2
            assert breaker_of(app).state != "closed"

        run(calls())
        app.close()
        pools.reset()


def test_a_call_waits_for_a_free_connection_until_its_deadline(
    make_app: MakeApp, proxy: Proxy, dq_url: str
) -> None:
    slow = {"broker_transport_options": {"socket_timeout": 30, "socket_connect_timeout": 30}}
    app = make_app(proxy.url(dq_url), **DIRECT, broker_pool_limit=1, dq_publish_timeout=0.3, **slow)
    made = notify_of(app)

    async def calls() -> None:
        await prepared(made)
        proxy.hold_answers_to, proxy.holds_left = b"holder", 1
        holder = asyncio.create_task(made.aapply_async(task_id="holder"))
        await until(lambda: proxy.held)
        with pytest.raises(BrokerUnavailable, match="use all 1 of them: raise broker_pool_limit"):
            await made.adelay()
        proxy.release_answers.set()
        await holder
        await made.adelay()

    run(calls())
    assert breaker_of(app).state == "closed"
    pools.reset()


def test_a_refusal_of_the_server_has_its_remedy_and_keeps_the_connection(make_app: MakeApp) -> None:
    with RedisServer() as server:
        app = make_app(server.url(scheme="dq-redis"), **DIRECT)
        made, admin = notify_of(app), redis.Redis.from_url(server.url())

        async def calls() -> None:
            await prepared(made)
            clients = admin.info("stats")["total_connections_received"]
            await made.adelay()
            admin.config_set("maxmemory", 1)
            for _ in range(3):
                with pytest.raises(BrokerOverloaded, match="Redis is full"):
                    await made.adelay()
            admin.config_set("maxmemory", 0)
            await made.adelay()
            assert admin.info("stats")["total_connections_received"] - clients <= 1

        run(calls())
        admin.close()
        app.close()
        pools.reset()


def test_a_call_that_too_few_replicas_confirm_is_an_error(make_app: MakeApp, stored: Stored) -> None:
    app = make_app(**DIRECT)
    made = notify_of(app)
    run(prepared(made))
    pools.reset()
    app = make_app(**DIRECT, dq_confirm_replicas=1, dq_publish_timeout="3s", dq_breaker_failures=0)
    made = notify_of(app)
    before = stored.count("celery")

    async def calls() -> None:
        for _ in range(4):
            with pytest.raises(OperationalError) as found:
                await made.adelay()
            assert isinstance(found.value.__cause__ or found.value, TooFewReplicas)

    run(calls())
    assert stored.count("celery") == before + 4
    pools.reset()


def test_a_queue_that_got_other_partitions_stores_each_call_once(make_app: MakeApp, stored: Stored) -> None:
    made = notify_of(make_app(**DIRECT))

    async def calls() -> list[str]:
        for _ in range(4):
            await made.aapply_async(queue="push")
        give_partitions(stored)
        return [(await made.aapply_async(queue="push", tenant=str(n))).id for n in range(40)]

    ids = run(calls())
    app = make_app(**DIRECT)
    found = [message.id for message in app.dq.queues["push"].peek(100)]
    assert Counter(found) == Counter(ids)


def test_a_call_with_an_earlier_number_is_sent_again_after_later_ones(
    make_app: MakeApp, proxy: Proxy, dq_url: str, stored: Stored
) -> None:
    policy = {"max_retries": 5, "interval_start": 0.3, "interval_step": 0, "interval_max": 0.3}
    app = make_app(proxy.url(dq_url), **DIRECT, dq_publish_timeout="60s", task_publish_retry_policy=policy)
    made = notify_of(app)

    async def calls() -> set[str]:
        await prepared(made)
        stored.client.flushdb()
        proxy.cut_requests, proxy.cuts_left = b"earlier", 1
        earlier = asyncio.create_task(made.aapply_async(task_id="earlier"))
        await until(lambda: proxy.cut)
        later = [(await made.adelay(number)).id for number in range(3)]
        assert not earlier.done()
        return {(await earlier).id, *later}

    assert run(calls()) == set(stored.ids("celery"))
    pools.reset()


def test_a_forked_child_awaits_calls_of_its_own_and_leaves_those_of_its_parent(
    direct_app: Any, stored: Stored
) -> None:
    made = notify_of(direct_app)

    async def calls() -> list[str]:
        await prepared(made)
        before = [(await made.adelay(number)).id for number in range(3)]
        # A child of the loop's process makes a loop of its own, as a server that forks its workers does.
        child = multiprocessing.get_context("fork").Process(target=child_calls, args=(made,))
        child.start()
        await asyncio.to_thread(child.join, 30)
        assert child.exitcode == 0
        return before + [(await made.adelay(number)).id for number in range(3)]

    ids = run(calls())
    assert set(ids) < set(stored.ids("celery"))
    assert stored.count("celery") == 4 + 3 + 6 + 3


def child_calls(made: Any) -> None:
    with ThreadPoolExecutor(1) as pool:  # its thread runs no loop
        pool.submit(asyncio.run, awaiting_all(made, 6)).result()


@pytest.mark.parametrize("sends_event", [False, True])
def test_an_awaited_call_may_name_no_producer_and_sends_its_event(
    make_app: MakeApp, stored: Stored, sends_event: bool
) -> None:
    app = make_app(**DIRECT, task_send_sent_event=sends_event)
    made = notify_of(app)
    events: list[dict[str, Any]] = []

    async def calls() -> set[str]:
        return {(await made.aapply_async((number,), producer=None)).id for number in range(4)}

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"task-sent": events.append})
        with receiver.consumer_context() as (listening, _, _):
            ids = run(calls())
            wait_until(lambda: received(listening, events, 4 if sends_event else 0), 30)
    assert set(stored.ids("celery")) == ids
    assert {each["uuid"] for each in events} == (ids if sends_event else set())


def received(connection: Any, events: list[Any], count: int) -> bool:
    if len(events) < count:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.1)
    return len(events) >= count
