"""Calls that are not buffered, to brokers that do not answer: a deadline, then a circuit breaker."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from celery import Celery, group
from kombu import pools
from kombu.exceptions import LimitExceeded, OperationalError

import celery_dq
from celery_dq.app.publishing.direct_stage import CircuitBreaker, DirectStage
from celery_dq.app.publishing.task_apply_async import TaskApplyAsync
from celery_dq.producer.sender import BrokerUnavailable
from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.proxy import Proxy

TIMEOUT_S = 0.9
#: Celery's own retry policy, with an early end.
HASTY = {"task_publish_retry_policy": {"max_retries": 0, "interval_start": 0}}
#: Additional seconds for a loaded machine.
SLACK_S = 4.0
URLS = ("redis://127.0.0.1:{}/0", "amqp://guest:guest@127.0.0.1:{}//", "dq-redis://127.0.0.1:{}/0")


@contextmanager
def deaf_port(kind: str) -> Iterator[int]:
    """Provide a port without answers: it refuses connections, never reads, or never accepts."""
    if kind == "refused":
        with dead_port() as port:
            yield port
        return
    with ExitStack() as stack:
        server = stack.enter_context(closing(socket.socket()))
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        if kind == "mute":
            server.listen(50)
        else:
            server.listen(0)
            for _ in range(3):  # they fill the queue of connections; further ones are dropped
                client = stack.enter_context(closing(socket.socket()))
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
        yield port


def make_app(url: str, **conf: Any) -> Any:
    app = Celery("shop", broker=url, set_as_current=False)
    # Longer than a stall of the machine, for brokers that answer or refuse at once.
    app.conf.update({"dq_publish_timeout": "30s", "dq_breaker_pause": "60s", **conf})
    celery_dq.setup(app)

    def notify(*args: int) -> None: ...

    app.task(name="notify", shared=False, ignore_result=True)(notify)
    return app


def breaker_of(app: Any) -> CircuitBreaker:
    (stage,) = (each for each in app.send_task.stages if isinstance(each, DirectStage))
    return stage.breaker


def failure(app: Any, **options: Any) -> tuple[Exception, float]:
    """Return the error of a call, and its duration in seconds."""
    started = time.monotonic()
    with pytest.raises(OperationalError) as found:
        app.tasks["notify"].apply_async((1,), **options)
    return found.value, time.monotonic() - started


@pytest.mark.parametrize("url", URLS, ids=lambda url: str(url).partition(":")[0])
@pytest.mark.parametrize("kind", ["mute", "hole"])
def test_a_silent_broker_costs_one_deadline_and_then_nothing(url: str, kind: str) -> None:
    with deaf_port(kind) as port:
        app = make_app(url.format(port), dq_publish_timeout=TIMEOUT_S)
        try:
            _, took = failure(app)
            assert took < TIMEOUT_S + SLACK_S
            # Several calls, because the machine may stall for the length of the deadline, but not in each
            # call.
            refused = [failure(app) for _ in range(5)]
            for error, _ in refused:
                assert isinstance(error, BrokerUnavailable)
                assert "has not answered lately" in str(error)
                assert "dq_breaker_pause" in str(error)
            assert min(took for _, took in refused) < TIMEOUT_S / 3
        finally:
            app.close()
            pools.reset()


def test_a_quick_call_of_a_task_has_the_deadline_and_the_breaker() -> None:
    patient = {"max_retries": 1000, "interval_start": 0, "interval_step": 0}
    with RedisServer() as server:
        url = server.url(scheme="dq-redis")
        app = make_app(url, dq_publish_timeout=TIMEOUT_S, task_publish_retry_policy=patient)
        try:
            for _ in range(3):
                app.tasks["notify"].apply_async((1,))
            assert isinstance(app.tasks["notify"].apply_async, TaskApplyAsync)
            server.pause()
            late, took = failure(app)
            assert "within dq_publish_timeout" in str(late)
            assert took < TIMEOUT_S + SLACK_S
            assert "has not answered lately" in str(failure(app)[0])
        finally:
            server.resume()
            app.close()
            pools.reset()


def test_a_refused_connection_opens_the_breaker_after_some_calls() -> None:
    with deaf_port("refused") as port:
        app = make_app(URLS[2].format(port), dq_breaker_failures=2, task_publish_retry=False)
        assert [type(failure(app)[0]) for _ in range(3)] == [
            OperationalError,
            OperationalError,
            BrokerUnavailable,
        ]
        # Calls of a group have the deadline. A call with its own producer, as from beat, has not.
        with app.producer_or_acquire() as producer:
            assert not isinstance(failure(app, producer=producer)[0], BrokerUnavailable)
        with pytest.raises(BrokerUnavailable):
            group(app.tasks["notify"].s(1), app.tasks["notify"].s(2)).apply_async()


@pytest.mark.parametrize("scheme", ["redis", "dq-redis"])
def test_a_probe_finds_the_broker_again(scheme: str) -> None:
    with RedisServer() as server:
        app = make_app(server.url(scheme=scheme), dq_breaker_failures=1, dq_breaker_pause="50ms")
        try:
            app.tasks["notify"].apply_async((1,))
            server.kill()
            failure(app, retry=False)
            assert breaker_of(app).state != "closed"
            server.start()

            def sent() -> bool:
                try:
                    app.tasks["notify"].apply_async((1,))
                except OperationalError:
                    return False
                return True

            wait_until(sent, 40)
            assert breaker_of(app).state == "closed"
        finally:
            app.close()
            pools.reset()


def test_the_first_call_to_a_queue_takes_two_round_trips(dq_url: str, proxy: Proxy) -> None:
    app = make_app(proxy.url(dq_url), dq_queues={"several": {"partitions": 3}})
    trips: dict[str, list[int]] = {}
    # The first one opens the connections, and brings the scripts.
    for queue in ("celery", "other", "other", "named", "several"):
        before = proxy.requests
        if queue == "named":
            app.send_task("elsewhere", queue=queue)
        else:
            app.tasks["notify"].apply_async((1,), queue=queue)
        trips.setdefault(queue, []).append(proxy.requests - before)
    depths = {name: app.dq.queues[name].depth for name in trips}
    app.close()
    assert (trips["other"], trips["named"]) == ([2, 1], [2])
    # For queues whose names are those of its partitions, for their maps, and for their sizes.
    assert trips["several"] == [5]
    assert depths == {"celery": 1, "other": 2, "named": 1, "several": 1}


def test_a_call_that_is_wrong_reports_nothing_about_the_broker(dq_url: str) -> None:
    app = make_app(dq_url, dq_breaker_failures=1)
    with pytest.raises(Exception, match="priority"):
        app.send_task("notify", priority=11)
    assert breaker_of(app).state == "closed"
    app.send_task("notify")


@pytest.mark.parametrize("scheme", ["redis", "dq-redis"])
@pytest.mark.parametrize("limit", ["dq_publish_timeout", "broker_pool_acquire_timeout"])
@pytest.mark.parametrize("held", ["a producer", "a connection"])
def test_a_call_waits_for_a_connection_of_the_pool_until_its_deadline(
    redis_url: str, scheme: str, limit: str, held: str
) -> None:
    app = make_app(
        redis_url.replace("redis:", f"{scheme}:"),
        broker_pool_limit=1,
        dq_breaker_failures=1,
        # By default they would be a third of the deadline.
        broker_transport_options={"socket_timeout": 30, "socket_connect_timeout": 30},
        **{limit: 0.15},
    )
    notify = app.tasks["notify"]
    calls: list[Callable[[], Any]] = [
        lambda: notify.apply_async((1,)),
        lambda: notify.apply_async((1,), countdown=60),
        group(notify.s(1), notify.s(2)).apply_async,
    ]
    for call in calls * 3:
        call()
    assert isinstance(notify.apply_async, TaskApplyAsync) is (scheme == "dq-redis")
    pool = app.producer_pool
    with (pool if held == "a producer" else pool.connections).acquire(block=True):
        for call in calls:
            started = time.monotonic()
            with pytest.raises(BrokerUnavailable, match="use all 1 of them: raise broker_pool_limit"):
                call()
            assert time.monotonic() - started < SLACK_S
        # No call has released what it did not get.
        with pytest.raises(LimitExceeded):
            pool.connections.acquire()
    assert breaker_of(app).state == "closed"
    for call in calls:
        call()
    app.close()
    pools.reset()


def test_a_policy_of_the_calls_own_is_followed() -> None:
    with deaf_port("refused") as port:
        app = make_app(URLS[2].format(port), dq_publish_timeout=0.1)
        policy = {"max_retries": 3, "interval_start": 0.2, "interval_step": 0, "interval_max": 0.2}
        error, took = failure(app, retry_policy=policy)
        assert not isinstance(error, BrokerUnavailable)
        assert took > 0.35


def test_publishes_of_a_task_are_always_tried() -> None:
    with deaf_port("refused") as port:
        app = make_app(URLS[2].format(port), dq_breaker_failures=1, task_publish_retry=False)
        failure(app)
        assert isinstance(failure(app)[0], BrokerUnavailable)

        def parent() -> str:
            return type(failure(app)[0]).__name__

        inner = app.task(name="parent", shared=False)(parent)
        assert inner.apply().get() == "OperationalError"


def test_a_task_that_is_applied_without_a_message_does_not_wait_for_the_broker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with deaf_port("refused") as port:
        app = make_app(URLS[2].format(port), dq_publish_timeout=TIMEOUT_S)

        def apply() -> None:
            failure(app)

        app.task(name="apply", shared=False)(apply).apply().get()
        assert "waits for the broker" not in caplog.text
        app.close()


def test_it_can_be_switched_off() -> None:
    with deaf_port("refused") as port:
        app = make_app(URLS[2].format(port), dq_breaker_failures=0, dq_publish_timeout=0, **HASTY)
        for _ in range(4):
            assert not isinstance(failure(app)[0], BrokerUnavailable)


@pytest.mark.parametrize("url", URLS, ids=lambda url: str(url).partition(":")[0])
@pytest.mark.parametrize("backend", ["redis://127.0.0.1:{}/1", "rpc://"], ids=["redis", "rpc"])
@pytest.mark.parametrize("kind", ["refused", "mute"])
def test_a_call_whose_result_is_kept_has_the_same_deadline(url: str, backend: str, kind: str) -> None:
    with deaf_port(kind) as port:
        app = make_app(url.format(port), dq_publish_timeout=TIMEOUT_S, result_backend=backend.format(port))
        try:
            started = time.monotonic()
            errors = [failure(app, ignore_result=False)[0] for _ in range(4)]
            # Celery's own policy would wait 19 s for the backend, and without a limit for an answer.
            assert time.monotonic() - started < 4 * TIMEOUT_S + SLACK_S
            assert isinstance(errors[-1], BrokerUnavailable)
            assert "has not answered lately" in str(errors[-1])
        finally:
            app.close()
            pools.reset()


@pytest.mark.parametrize("broker", ["redis", "dq-redis"])
@pytest.mark.parametrize("backend", ["redis", "rpc"])
def test_a_broker_that_dies_between_two_calls_costs_one_deadline(broker: str, backend: str) -> None:
    with RedisServer() as server:
        result_backend = "rpc://" if backend == "rpc" else server.url(1)
        app = make_app(server.url(scheme=broker), dq_publish_timeout=TIMEOUT_S, result_backend=result_backend)
        try:
            for _ in range(2):
                app.tasks["notify"].apply_async((1,), ignore_result=False)
            server.kill()
            started = time.monotonic()
            errors = [failure(app, ignore_result=False)[0] for _ in range(4)]
            assert time.monotonic() - started < 4 * TIMEOUT_S + SLACK_S
            assert isinstance(errors[-1], BrokerUnavailable)
        finally:
            app.close()
            pools.reset()


def test_a_result_backend_that_is_away_keeps_no_call_from_the_broker(redis_url: str) -> None:
    with RedisServer() as server:
        app = make_app(server.url(scheme="dq-redis"), result_backend=redis_url)
        answered = app.tasks["notify"].apply_async((1,), ignore_result=False)
        with dead_port() as port:
            away = make_app(server.url(scheme="dq-redis"), result_backend=f"redis://127.0.0.1:{port}/0")
            for _ in range(3):
                away.tasks["notify"].apply_async((1,), ignore_result=False)
        assert app.dq.queues["celery"].depth == 4
        # A caller gets a result that came before its request, and one that comes while it waits.
        app.backend.store_result(answered.id, 5, "SUCCESS")
        assert answered.get(timeout=30) == 5
        awaited = app.tasks["notify"].apply_async((1,), ignore_result=False)
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(awaited.get(timeout=30)))
        thread.start()
        channel = app.backend.get_key_for_task(awaited.id)
        wait_until(lambda: app.backend.client.pubsub_numsub(channel)[0][1], 30)
        app.backend.store_result(awaited.id, 6, "SUCCESS")
        thread.join(30)
        assert got == [6]
        for each in (app, away):
            each.close()
        pools.reset()


def test_a_probe_that_failed_for_another_reason_lets_the_next_call_go() -> None:
    with RedisServer() as server:
        # A probe without a reported outcome would block other calls for 30 s.
        app = make_app(server.url(scheme="dq-redis"), dq_breaker_failures=1, dq_breaker_pause="50ms")
        try:
            server.stop()
            failure(app, retry=False)
            server.start()
            wait_until(lambda: breaker_of(app).state == "half-open", 30)
            with pytest.raises(ValueError, match="priority"):
                app.send_task("notify", priority=11)
            assert breaker_of(app).state == "half-open"
            app.tasks["notify"].apply_async((1,))
            assert breaker_of(app).state == "closed"
        finally:
            app.close()
            pools.reset()
