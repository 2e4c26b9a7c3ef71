"""``dq_confirm_replicas`` on a master that lacks replicas: one wait, an error with a remedy, one message."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from kombu import pools
from kombu.exceptions import OperationalError

from celery_dq.app.publishing.direct_stage import DirectStage
from celery_dq.errors import TooFewReplicas
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.packer import PackedMessage
from celery_dq.transport.redis.store import publisher
from tests.apps import run_task
from tests.lua.partition_scripts import make_record
from tests.producer.conftest import MakeApp

CONFIRM = {"dq_confirm_replicas": 1, "dq_breaker_failures": 1, "dq_buffer": False, "dq_buffer_folder": ""}


@pytest.fixture
def app_of(server: RedisServer, admin: Any, make_app: MakeApp) -> Callable[..., Any]:
    """Make an app with the task ``notify``, whose messages one replica has to confirm."""

    def make(**conf: Any) -> Any:
        app = make_app(server.url(scheme="dq-redis"), **{**CONFIRM, **conf})

        def notify(*args: int) -> None: ...

        app.task(name="notify", shared=False, ignore_result=True)(notify)
        app.task(name="keyed", shared=False, ignore_result=True, dedup=True)(notify)
        return app

    return make


def waits(admin: Any) -> int:
    """Return how often the server was asked to wait for replicas."""
    return calls_of(admin, "wait")


def calls_of(admin: Any, command: str) -> int:
    """Return how often the server got a command."""
    return int(admin.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def error_of(call: Callable[[], Any]) -> OperationalError:
    with pytest.raises(OperationalError) as caught:
        call()
    return caught.value


def breaker_state(app: Any) -> str:
    (stage,) = (each for each in app.send_task.stages if isinstance(each, DirectStage))
    return str(stage.breaker.state)


def test_a_short_timeout_of_publishes_shortens_the_wait(app_of: Callable[..., Any]) -> None:
    """A step has a third of it, and the answer of the server has to arrive within a step."""
    app = app_of(dq_publish_timeout=2.0)
    for _ in range(2):
        error = error_of(lambda: app.tasks["notify"].delay(1))
        assert isinstance(error.__cause__, TooFewReplicas)
        for part in (
            "dq_confirm_replicas = 1, but 0",
            "within 533 ms",
            "stored on its master",
            "a longer dq_publish_timeout",
        ):
            assert part in str(error)
        assert breaker_state(app) == "closed"
    assert app.dq.queues["celery"].snapshot().waiting == 2


@pytest.mark.parametrize(
    ("socket_timeout", "expected"), [(None, 2000), (15.0, 2000), (2.0, 1600), (0.001, 1)]
)
def test_the_wait_ends_before_the_socket_timeout(
    app_of: Callable[..., Any], socket_timeout: float | None, expected: int
) -> None:
    app = app_of(broker_transport_options={"socket_timeout": 15.0})
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        channel.pool.connection_kwargs["socket_timeout"] = socket_timeout
        assert channel.publisher._confirm_timeout_ms() == expected


def test_a_call_waits_once(app_of: Callable[..., Any], admin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "CONFIRM_TIMEOUT_MS", 1)
    app = app_of()
    notify, keyed = app.tasks["notify"], app.tasks["keyed"]
    ways: tuple[Callable[[], Any], ...] = (
        lambda: notify.delay(1),
        lambda: notify.delay(2),  # on the connection of the pool, by a template
        lambda: notify.apply_async((3,), countdown=1),
        lambda: keyed.delay(4),
        lambda: app.send_task("elsewhere"),
    )
    for call in ways:
        before = waits(admin)
        error = error_of(call)
        assert isinstance(error.__cause__, TooFewReplicas)
        assert "celery dq doctor" in str(error)
        assert waits(admin) == before + 1
    assert app.dq.queues["celery"].depth == len(ways)
    assert breaker_state(app) == "closed"


def test_a_policy_of_the_calls_own_tries_again_and_stores_one_message(
    app_of: Callable[..., Any], admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "CONFIRM_TIMEOUT_MS", 1)
    app = app_of()
    before = waits(admin)
    policy = {"max_retries": 2, "interval_start": 0, "interval_step": 0}
    error = error_of(lambda: app.tasks["notify"].apply_async((1,), retry_policy=policy))
    assert isinstance(error.__cause__, TooFewReplicas)
    assert waits(admin) == before + 3
    assert app.dq.queues["celery"].depth == 1
    assert breaker_state(app) == "closed"


def test_a_call_of_a_running_task_waits_until_the_replicas_are_back(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed call would break the chain of a task that has succeeded."""
    monkeypatch.setattr(publisher, "CONFIRM_TIMEOUT_MS", 20)
    with RedisServer(config={"repl-diskless-sync-delay": 0}) as master:
        app: Any = make_app(master.url(scheme="dq-redis"), **CONFIRM)

        def parent() -> None:
            app.send_task("notify")

        task: Any = app.task(name="parent", shared=False)(parent)
        thread = threading.Thread(target=lambda: run_task(task), daemon=True)
        with redis.Redis(port=master.port, socket_timeout=20) as client:
            thread.start()
            wait_until(lambda: waits(client) >= 2, 30)
            with RedisServer(config={"replicaof": f"127.0.0.1 {master.port}"}):
                thread.join(60)
        assert app.dq.queues["celery"].depth == 1
        app.close()
        pools.reset()


def test_the_buffer_sends_again_until_the_replicas_confirm(
    app_of: Callable[..., Any], admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "CONFIRM_TIMEOUT_MS", 1)
    app = app_of(dq_buffer=True, dq_buffer_folder="")
    given_up: list[tuple[str, str]] = []
    app.dq.buffer.on_error(lambda error, message, state: given_up.append((str(error), state)))
    before = waits(admin)
    app.tasks["notify"].delay(1)
    wait_until(lambda: waits(admin) >= before + 2, 30)
    assert "dq_confirm_replicas = 1, but 0 replicas" in app.dq.buffer.inspect().last_error
    assert app.dq.queues["celery"].depth == 1
    app.dq.buffer.close(timeout=0)
    ((_, state),) = given_up
    assert state == "possibly_sent"


def test_a_message_that_is_sent_again_over_another_connection_is_confirmed_by_a_replica(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message was a write of the first connection, and a push that finds it stored writes nothing.

    Redis promises that WAIT waits for the writes of its own connection. Some releases, as 7.0, wait for all
    writes, so the test also looks for the write.
    """
    monkeypatch.setattr(publisher, "CONFIRM_TIMEOUT_MS", 200)
    with RedisServer(config={"repl-diskless-sync-delay": 0}) as master:
        app: Any = make_app(master.url(scheme="dq-redis"), **CONFIRM)
        with (
            RedisServer(config={"replicaof": f"127.0.0.1 {master.port}"}) as replica,
            redis.Redis(port=master.port, socket_timeout=20) as client,
            app.connection_for_write() as connection,
        ):
            wait_until(lambda: "'state': 'online'" in str(client.info("replication")), 30)
            client.set("loaded", 1)
            assert client.wait(1, 10_000) == 1  # it is online before it has loaded what it got
            channel = connection.default_channel
            sender = channel.publisher
            sender.push([sender.number(PackedMessage("celery", "first", make_record()))])
            message = sender.number(PackedMessage("celery", "second", make_record()))
            os.kill(replica.pid, signal.SIGSTOP)
            try:
                for writes in (0, 1):
                    with pytest.raises(TooFewReplicas):
                        sender.push([message])
                    assert calls_of(client, "pexpire") == writes
                    sender.close()
                    channel.pool.disconnect()
            finally:
                os.kill(replica.pid, signal.SIGCONT)
            sender.push([message])
            assert app.dq.queues["celery"].depth == 2
        app.close()
        pools.reset()
