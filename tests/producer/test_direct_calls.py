"""Calls that are not buffered, to brokers that do not answer: one deadline, then a breaker."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from celery import Celery, group
from kombu import pools
from kombu.exceptions import OperationalError

import celery_dq
from celery_dq.app.calling import BufferedCalls
from celery_dq.app.direct_calls import DirectCalls
from celery_dq.producer.circuit_breaker import CircuitBreaker
from celery_dq.producer.errors import BrokerUnavailable
from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until

TIMEOUT_S = 0.9
#: Celery's own policy, with an end soon.
HASTY = {"task_publish_retry_policy": {"max_retries": 0, "interval_start": 0}}
#: What a loaded machine may add.
SLACK_S = 1.5
URLS = ("redis://127.0.0.1:{}/0", "amqp://guest:guest@127.0.0.1:{}//", "dq-redis://127.0.0.1:{}/0")


@contextmanager
def deaf_port(kind: str) -> Iterator[int]:
    """A port where nobody answers: nobody listens, nobody reads, or not even the connection is made."""
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
            for _ in range(3):  # they fill its queue; further ones are dropped
                client = stack.enter_context(closing(socket.socket()))
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
        yield port


def make_app(url: str, **conf: Any) -> Any:
    app = Celery("shop", broker=url, set_as_current=False)
    # Longer than a machine stands still, where a broker or a refusal answers at once.
    app.conf.update({"dq_publish_timeout": "30s", "dq_breaker_pause": "60s", **conf})
    celery_dq.setup(app)

    def notify(*args: int) -> None: ...

    app.task(name="notify", shared=False, ignore_result=True)(notify)
    return app


def breaker_of(app: Any) -> CircuitBreaker:
    calls = app.send_task
    assert isinstance(calls, BufferedCalls)
    direct = calls._send_task
    assert isinstance(direct, DirectCalls)
    return direct.breaker


def failure(app: Any, **options: Any) -> tuple[Exception, float]:
    """The error of a call, and the seconds it took."""
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
            # Several: a machine may stand still for as long as the deadline, though not for each of them.
            refused = [failure(app) for _ in range(5)]
            for error, _ in refused:
                assert isinstance(error, BrokerUnavailable)
                assert "has not answered lately" in str(error)
                assert "dq_breaker_pause" in str(error)
            assert refused[0][1] < TIMEOUT_S
            assert min(took for _, took in refused) < TIMEOUT_S / 3
        finally:
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
        # Calls of a group are guarded, and who brings a producer, as beat does, is not.
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


def test_a_call_that_is_wrong_says_nothing_about_the_broker(dq_url: str) -> None:
    app = make_app(dq_url, dq_breaker_failures=1)
    with pytest.raises(Exception, match="priority"):
        app.send_task("notify", priority=11)
    assert breaker_of(app).state == "closed"
    app.send_task("notify")


def test_a_policy_of_the_calls_own_is_followed() -> None:
    with deaf_port("refused") as port:
        app = make_app(URLS[2].format(port), dq_publish_timeout=0.1)
        policy = {"max_retries": 3, "interval_start": 0.2, "interval_step": 0, "interval_max": 0.2}
        error, took = failure(app, retry_policy=policy)
        assert not isinstance(error, BrokerUnavailable)
        assert took > 0.35


def test_what_a_task_publishes_is_always_tried() -> None:
    with deaf_port("refused") as port:
        app = make_app(URLS[2].format(port), dq_breaker_failures=1, task_publish_retry=False)
        failure(app)
        assert isinstance(failure(app)[0], BrokerUnavailable)

        def parent() -> str:
            return type(failure(app)[0]).__name__

        inner = app.task(name="parent", shared=False)(parent)
        assert inner.apply().get() == "OperationalError"


def test_it_can_be_switched_off() -> None:
    with deaf_port("refused") as port:
        app = make_app(URLS[2].format(port), dq_breaker_failures=0, dq_publish_timeout=0, **HASTY)
        for _ in range(4):
            assert not isinstance(failure(app)[0], BrokerUnavailable)
