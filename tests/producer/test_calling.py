from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, group, signals
from celery.app.trace import build_tracer
from celery.exceptions import TimeoutError as CeleryTimeout
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

import celery_dq
from celery_dq.app.api.buffer import BufferApi
from celery_dq.app.publishing.pipeline import PARAMETERS
from celery_dq.errors import ConfigurationError, InvalidMessage, InvalidTenant
from celery_dq.producer.buffered_producer import BufferedProducer
from celery_dq.producer.flusher import Undelivered
from celery_dq.producer.sender import Addressed, BufferFull
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.apps import DQCelery, task
from tests.children import in_child, in_threads
from tests.producer.conftest import MakeApp, Stored
from tests.producer.producer_harness import close_at_once

DEAD = "dq-redis://127.0.0.1:1/0"


def tasks(app: DQCelery) -> Any:
    app.conf.task_routes = {"*": "push"}

    @task(app, tenant="{merchant}")
    def notify(merchant: Any, order: Any = None) -> None: ...

    return notify


def nothing() -> None: ...


def test_a_call_is_in_the_broker_after_a_flush_as_if_it_had_been_published(
    make_app: MakeApp, stored: Stored
) -> None:
    notify = tasks(make_app(task_send_sent_event=False))
    buffered = notify.apply_async((42, "A-1"), priority=3, countdown=None)
    direct = notify.apply_async((42, "A-1"), priority=3, buffered=False)
    assert notify.app.dq.buffer.flush(30) == 0
    assert sorted(stored.ids("push")) == sorted([direct.id, buffered.id])
    one, other = stored.record("push", buffered.id), stored.record("push", direct.id)
    assert (one.tenant, one.task, one.priority, one.body) == ("42", notify.name, 3, other.body)
    headers, properties, body = stored.message("push", buffered.id)
    headers2, properties2, _ = stored.message("push", direct.id)
    for each in (headers, headers2):
        del each["id"], each["root_id"]
    for each in (properties, properties2):
        del each["correlation_id"]
    assert headers == headers2
    assert properties == properties2
    assert body == [[42, "A-1"], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]


def test_a_dead_broker_does_not_hinder_a_call_and_gets_all_when_it_is_back(
    make_app: MakeApp, tmp_path: Path
) -> None:
    with RedisServer(appendonly=True) as server:
        app = make_app(server.url(scheme="dq-redis"), result_backend=server.url())
        notify = tasks(app)
        first = notify.delay(1)
        assert app.dq.buffer.flush(30) == 0
        server.kill()
        ids = [first.id] + [notify.delay(1).id for _ in range(20)]
        assert app.dq.buffer.flush(0.3) == 20
        seen = app.dq.buffer.inspect()
        assert (seen.pending, seen.in_memory) == (20, 20)
        assert seen.age_s > 0.2
        wait_until(lambda: "ConnectionError" in app.dq.buffer.inspect().last_error, 30)
        assert seen.spill_bytes > 20 * 200
        server.restart()
        assert app.dq.buffer.flush(30) == 0
        found = Stored(server.url())
        assert found.ids("push") == ids
        found.client.close()
        assert app.dq.buffer.inspect().last_error == ""


@pytest.mark.parametrize(
    ("setting", "own", "block", "call", "expected"),
    [
        (False, None, None, None, False),
        (True, None, None, None, True),
        (True, False, None, None, False),
        (False, True, None, None, True),
        (True, None, False, None, False),
        (False, False, True, None, True),
        (True, True, None, False, False),
        (False, False, False, True, True),
    ],
)
def test_the_setting_decides_whether_a_call_is_buffered(
    make_app: MakeApp,
    setting: bool,
    own: bool | None,
    block: bool | None,
    call: bool | None,
    expected: bool,
) -> None:
    app = make_app(dq_buffer=setting)
    options = {} if own is None else {"buffered": own}
    job = task(app, name="job", **options)(nothing)
    chosen = {} if call is None else {"buffered": call}
    if block is None:
        job.apply_async(**chosen)
    else:
        with app.dq.buffer.buffered(block):
            job.apply_async(**chosen)
    assert app.dq.buffer.inspect().counters.get("accepted", 0) == int(expected)


@pytest.mark.parametrize("way", ["retry", "replace", "call"])
def test_a_run_that_publishes_itself_again_does_not_leave_it_in_the_buffer(
    make_app: MakeApp, stored: Stored, way: str
) -> None:
    app = make_app(dq_buffer_in_workers=True, dq_buffer_linger="60s")
    other = task(app, name="other")(nothing)

    def run(self: Any) -> None:
        other.delay()
        if way == "retry":
            raise self.retry(countdown=0)
        if way == "replace":
            raise self.replace(other.si().set(buffered=True))
        self.apply_async(task_id=self.request.id)

    job = task(app, name="job", bind=True)(run)
    build_tracer("job", job, app=app)("mine", [], {}, {"id": "mine"})
    assert stored.ids("celery") == ["mine"]
    assert app.dq.buffer.inspect().pending == 1  # the other call


def test_send_task_and_signatures_are_buffered_and_producers_of_the_caller_are_not(
    make_app: MakeApp, stored: Stored
) -> None:
    app = make_app()
    notify = tasks(app)
    app.send_task("elsewhere.task", (1,), queue="push", tenant="7")
    chain(notify.si(1), notify.si(2)).apply_async()
    assert app.dq.buffer.inspect().counters["accepted"] == 2
    with app.producer_or_acquire() as producer:
        notify.apply_async((1,), producer=producer)
    with app.connection_for_write() as connection:
        notify.apply_async((1,), connection=connection)
    notify.apply_async((1,), retry=False)
    assert app.dq.buffer.inspect().counters["accepted"] == 2
    group(notify.si(1), notify.si(2)).apply_async()
    assert app.dq.buffer.inspect().counters["accepted"] == 4
    assert app.dq.buffer.flush(30) == 0
    assert stored.count("push") == 7


def test_signals_fire_in_the_caller_and_may_change_the_message(make_app: MakeApp, stored: Stored) -> None:
    notify = tasks(make_app())
    seen: list[str] = []

    def before(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append("before")
        headers["trace"] = "00-ab"

    def after(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(f"after {headers['trace']}")

    signals.before_task_publish.connect(before, sender=notify.name)
    signals.after_task_publish.connect(after, sender=notify.name)
    try:
        result = notify.delay(1)
        assert seen == ["before", "after 00-ab"]
    finally:
        signals.before_task_publish.disconnect(before, sender=notify.name)
        signals.after_task_publish.disconnect(after, sender=notify.name)
    assert notify.app.dq.buffer.flush(30) == 0
    assert stored.message("push", result.id)[0]["trace"] == "00-ab"


def test_errors_of_a_call_are_raised_in_it(make_app: MakeApp) -> None:
    notify = tasks(make_app())
    with pytest.raises(TypeError):
        notify.delay()
    with pytest.raises(InvalidTenant):
        notify.delay("a\nb")
    with pytest.raises(InvalidMessage):
        notify.apply_async((1,), task_id="x" * 300)
    assert notify.app.dq.buffer.inspect().pending == 0


def test_without_a_folder_nothing_is_buffered_and_the_remedy_is_reported(make_app: MakeApp) -> None:
    notify = tasks(make_app(dq_buffer=False, dq_buffer_folder=None))
    with pytest.raises(ConfigurationError, match="dq_buffer_folder"):
        notify.apply_async((1,), buffered=True)
    assert notify.app.dq.buffer.inspect().owners == ()


def test_a_full_buffer_raises_an_operational_error_in_time(make_app: MakeApp) -> None:
    app = make_app(DEAD, dq_buffer_folder="", dq_buffer_max_messages=5, dq_buffer_max_block="50ms")
    notify = tasks(app)
    for _ in range(5):
        notify.delay(1)
    with pytest.raises(OperationalError, match="the buffer's memory") as caught:
        notify.delay(1)
    assert isinstance(caught.value, BufferFull)

    async def call() -> None:
        notify.delay(1)

    with pytest.raises(BufferFull):
        asyncio.run(call())
    seen = app.dq.buffer.inspect()
    assert (seen.pending, seen.counters["full"]) == (5, 2)


@pytest.mark.logged_error("a hook may fail")
def test_a_message_in_memory_only_is_reported_when_the_buffer_is_closed(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(DEAD, dq_buffer_folder="")
    notify = tasks(app)
    reported: list[tuple[str, str]] = []

    @app.dq.buffer.on_error
    def lost(error: BaseException, message: Undelivered, state: str) -> None:
        reported.append((message.task_id, state))
        raise ValueError("a hook may fail")

    result = notify.delay(1)
    with caplog.at_level(logging.ERROR):
        assert close_at_once(app.dq.buffer.producer) == 1
    assert reported[0][0] == result.id


def test_delivery_is_reported_to_a_hook(make_app: MakeApp) -> None:
    app = make_app()
    notify = tasks(app)
    reported: list[str] = []
    app.dq.buffer.on_delivered(reported.extend)
    ids = [notify.delay(1).id for _ in range(5)]
    assert app.dq.buffer.flush(30) == 0
    wait_until(lambda: reported == ids, 30)


def test_aflush_waits_in_a_coroutine(make_app: MakeApp, stored: Stored) -> None:
    app = make_app()
    notify = tasks(app)

    async def call() -> int:
        notify.delay(1)
        return await app.dq.buffer.aflush(30)

    assert asyncio.run(call()) == 0
    assert stored.count("push") == 1


def test_waiting_for_a_result_lets_nothing_linger(make_app: MakeApp, stored: Stored, redis_url: str) -> None:
    app = make_app(dq_buffer_linger="60s", result_backend=redis_url)
    result = tasks(app).delay(1)
    with pytest.raises(CeleryTimeout):
        result.get(timeout=0.5)
    wait_until(lambda: stored.count("push") == 1, 30)
    # Before its server ends, because a result unsubscribes when it is collected.
    backend: Any = app.backend
    backend.remove_pending_result(result)


def test_a_refused_message_does_not_hold_up_the_others(make_app: MakeApp, stored: Stored) -> None:
    app = make_app()
    notify = tasks(app)
    reported: list[tuple[str, str]] = []
    app.dq.buffer.on_error(lambda error, message, state: reported.append((message.task_id, state)))
    first = notify.delay(1)
    app.dq.buffer.producer.put(Addressed("p0/push", b"bad", b"no record"))
    last = notify.delay(1)
    assert app.dq.buffer.flush(30) == 0
    assert stored.ids("push") == [first.id, last.id]
    assert reported == [("bad", "rejected")]
    assert len(app.dq.buffer.inspect().quarantined) == 1


def test_a_topic_exchange_and_a_transient_queue_take_kombus_way(make_app: MakeApp, stored: Stored) -> None:
    app = make_app()
    app.conf.task_queues = [
        Queue("by.topic", Exchange("topics", type="topic"), routing_key="order.#"),
        Queue("passing", auto_delete=True, durable=False),
    ]
    job: Any = app.task(name="job", shared=False)(nothing)
    with app.connection_for_write() as connection:
        for queue in app.amqp.queues.values():
            queue(connection).declare()
        result = job.apply_async(queue="by.topic", routing_key="order.paid")
        job.apply_async(queue="passing")
        assert app.dq.buffer.flush(30) == 0
        assert stored.ids("by.topic") == [result.id]


def test_on_the_stock_transport_messages_are_as_celery_writes_them(make_app: MakeApp, redis_url: str) -> None:
    app = make_app(redis_url)
    notify = tasks(app)
    ids = [notify.apply_async((1, "x"), expires=3600, headers={"a": 1}).id for _ in range(3)]
    assert app.dq.buffer.flush(30) == 0
    with app.connection_for_read() as connection:
        queue = app.amqp.queues["push"](connection)
        for expected in ids:
            message: Any = queue.get()
            assert message is not None
            assert message.headers["id"] == expected
            assert message.headers["a"] == 1
            assert 0 < int(message.properties["expiration"]) <= 3_600_000
            assert message.payload[0] == [1, "x"]
            message.ack()


@pytest.mark.parametrize(
    "url",
    [
        "dq-redis://user:{0}@h1:6379/0",
        "dq-rediscluster://:{0}@h1:7000,h2:7001",
        "dq-sentinel://:{0}@h1:26379;dq-sentinel://:{0}@h2:26379",
        "dq-redis://h1/0?password={0};dq-redis://h2/0?password={0}",
    ],
)
def test_the_folder_depends_on_the_servers_and_not_on_their_password(make_app: MakeApp, url: str) -> None:
    folder = make_app(url.format("old")).dq.buffer.folder
    assert folder == make_app(url.format("n%40w:")).dq.buffer.folder
    assert folder != make_app(url.format("old").replace("h1", "h3")).dq.buffer.folder


def test_a_forked_child_has_a_buffer_of_its_own(make_app: MakeApp, stored: Stored) -> None:
    app = make_app(dq_buffer_linger="60s")
    notify = tasks(app)
    mine = notify.delay(1).id

    def child() -> bool:
        theirs = notify.delay(2)
        assert app.dq.buffer.flush(30) == 0
        app.dq.buffer.close(5)
        return stored.ids("push") == [theirs.id]

    assert in_child(child)
    assert app.dq.buffer.inspect().pending == 1
    assert app.dq.buffer.flush(30) == 0
    assert stored.count("push") == 2
    assert stored.ids("push")[1] == mine


def test_threads_that_make_their_first_calls_together_share_a_buffer(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(dq_buffer_linger="60s")
    notify = tasks(app)
    make, meeting = BufferApi._make, threading.Barrier(2)

    def make_together(buffer: BufferApi) -> BufferedProducer:
        meeting.wait(30)
        return make(buffer)

    monkeypatch.setattr(BufferApi, "_make", make_together)
    in_threads(lambda: notify.delay(1), lambda: notify.delay(2))
    assert app.dq.buffer.inspect().pending == 2


def test_json_of_a_snapshot_is_no_surprise(make_app: MakeApp) -> None:
    app = make_app()
    tasks(app).delay(1)
    app.dq.buffer.flush(30)
    counters = app.dq.buffer.inspect().counters
    assert json.loads(json.dumps(counters))["delivered"] == 1


def test_a_call_with_a_dedup_key_waits_for_its_verdict(make_app: MakeApp, stored: Stored) -> None:
    app = make_app(task_routes={"refresh": "cache"})

    def refresh(sku: str) -> None: ...

    made = task(app, name="refresh", dedup={"key": "{sku}"})(refresh)
    first, second = made.delay("a"), made.delay("a")
    assert second.id == first.id
    assert app.dq.buffer.inspect().counters.get("accepted", 0) == 0
    assert stored.count("cache") == 1


def test_to_set_an_app_up_twice_is_to_set_it_up_once(make_app: MakeApp) -> None:
    app = make_app()
    before = app.send_task
    celery_dq.setup(app)
    assert app.send_task is before


def test_the_parameters_of_send_task_are_celerys() -> None:
    parameters = inspect.signature(inspect.unwrap(Celery.send_task)).parameters
    assert tuple(parameters) == ("self", "name", "args", "kwargs", *PARAMETERS, "options")


def test_options_of_send_task_may_be_positional(make_app: MakeApp, stored: Stored) -> None:
    app: Any = make_app()
    assert app.send_task("elsewhere", (1,), None, None, None, "mine").id == "mine"
    assert app.dq.buffer.flush(30) == 0
    assert stored.record("celery", "mine").task == "elsewhere"
    for more in ((None,) * 3, (None,) * 60):
        with pytest.raises(TypeError):
            app.send_task("elsewhere", (1,), None, *more, task_id="twice")
