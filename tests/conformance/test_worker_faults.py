"""Mingle and gossip, a broker that restarts, messages that no worker can read."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from uuid import uuid4

import pytest
from kombu import Connection, Producer

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.conformance.celery_app import CeleryApp
from tests.conformance.kombu_queue import kill_connections, on_redis
from tests.conformance.shop import BROKER_DB
from tests.workers import WorkerProcess

WAIT = 30


def newcomer(celery_app: CeleryApp) -> WorkerProcess:
    """A second worker that has synchronised with the first one: Celery waits only one second for answers."""
    for number in range(5):
        second = celery_app.worker("threads", name=f"second{number}", arguments=())
        try:
            second.start().wait_ready()
            if "mingle: all alone" not in second.log:
                return second
        except BaseException:
            second.discard()
            raise
        second.discard()
    raise TimeoutError("no answer to the new connections")


@on_redis
def test_two_workers_mingle_and_gossip(celery_app: CeleryApp) -> None:
    with celery_app.worker("threads", name="first", arguments=(), loglevel="DEBUG") as first:
        revoked = uuid4().hex
        # A broadcast reaches only subscribers, and a worker that consumes may not have subscribed yet.
        celery_app.ask("ping")
        celery_app.app.control.revoke(revoked)
        wait_until(lambda: revoked in celery_app.ask("revoked"), WAIT)
        with ExitStack() as stack:
            second = newcomer(celery_app)
            stack.push(second)
            # mingle: the new worker learns the ids that were revoked before its start
            second.wait_for_log("mingle: sync with 1 nodes")
            second.wait_for_log("mingle: sync complete")
            assert revoked in celery_app.ask("revoked", destinations=[second.name])
            # gossip: the first worker notices the start and the end of the new one
            first.wait_for_log(f"{second.name} joined the party", WAIT)
            results = [celery_app.send("add", number, 1) for number in range(20)]
            assert [result.get(timeout=WAIT) for result in results] == list(range(1, 21))
            second.stop()
        first.wait_for_log(f"{second.name} left", WAIT)


@on_redis
def test_a_task_that_runs_while_the_connection_is_lost(
    celery_app: CeleryApp, redis_server: RedisServer
) -> None:
    key = uuid4().hex
    with celery_app.worker("prefork", concurrency=2) as worker:
        result = celery_app.send("hold_late", key)
        celery_app.witness.wait(f"started:{key}")
        kill_connections(redis_server.port, BROKER_DB)
        worker.wait_for_log("Connection to broker lost")
        if celery_app.broker.expected("a blip does not run a task twice", True):
            assert celery_app.send("add", 1, 1).get(timeout=WAIT) == 2
            assert celery_app.witness.reports(f"started:{key}") == []
            celery_app.witness.release(key)
        else:
            # Celery 5.5 receives the message at once, and begins it when the first run has ended.
            celery_app.witness.release(key, 2)
            celery_app.witness.wait(f"started:{key}")
        assert result.get(timeout=WAIT) == key
    assert celery_app.waiting() == 0


def test_an_unknown_task_is_dropped(celery_app: CeleryApp) -> None:
    with celery_app.worker("prefork") as worker:
        celery_app.app.send_task("unknown.task", queue=celery_app.queue)
        worker.wait_for_log("Received unregistered task")
        if celery_app.conf["broker_url"].startswith("dq-redis"):
            worker.wait_for_log("Task 'unknown.task' is not registered in this worker: its message")
        assert celery_app.send("add", 1, 1).get(timeout=WAIT) == 2
    assert celery_app.waiting() == 0


@pytest.mark.logged_error("kombu.exceptions.DecodeError", "kombu.exceptions.ContentDisallowed")
def test_a_message_that_is_no_task_is_dropped(celery_app: CeleryApp) -> None:
    with Connection(celery_app.conf["broker_url"]) as connection:
        producer = Producer(connection.channel())
        producer.publish(
            "{ not json",
            content_type="application/json",
            content_encoding="utf-8",
            serializer=None,
            routing_key=celery_app.queue,
        )
        producer.publish({"no": "task"}, routing_key=celery_app.queue, serializer="json")
        producer.publish([1, 2, 3], routing_key=celery_app.queue, serializer="pickle")
    with celery_app.worker("prefork") as worker:
        assert celery_app.send("add", 1, 1).get(timeout=WAIT) == 2
        worker.wait_for_log("Received and deleted unknown message")
        worker.wait_for_log("Can't decode message body")
    assert celery_app.waiting() == 0


def test_messages_of_the_first_protocol(celery_app: CeleryApp) -> None:
    subject = uuid4().hex
    body = {"task": "report", "id": uuid4().hex, "args": [subject, "old style"], "kwargs": {}, "retries": 0}
    with celery_app.worker("solo"), Connection(celery_app.conf["broker_url"]) as connection:
        Producer(connection.channel()).publish(body, routing_key=celery_app.queue, serializer="json")
        assert celery_app.witness.wait(subject) == "old style"


# Only on dq: a worker on the stock transport sometimes does not end after this.
@pytest.mark.parametrize("broker", ["dq"], indirect=True)
@pytest.mark.parametrize("state", ["not read", "running"])
def test_a_child_dies_while_the_connection_is_lost(
    celery_app: CeleryApp, redis_server: RedisServer, state: str
) -> None:
    key = uuid4().hex
    with celery_app.worker("prefork", concurrency=1) as worker:
        (child,) = celery_app.ask("stats")["pool"]["processes"]
        if state == "not read":
            os.kill(child, signal.SIGSTOP)
        result = celery_app.send("hold_or_die", key)
        if state == "running":
            celery_app.witness.wait(f"started:{key}")
        else:
            worker.wait_for_log(result.id)
        # When the worker notices both at once
        os.kill(worker.pid, signal.SIGSTOP)
        os.kill(child, signal.SIGKILL)
        kill_connections(redis_server.port, BROKER_DB)
        os.kill(worker.pid, signal.SIGCONT)
        # Then another child gets the message of the first one.
        celery_app.witness.wait(f"started:{key}", WAIT)
        celery_app.witness.release(key)
        assert result.get(timeout=WAIT) == key
    assert celery_app.waiting() == 0


# Only on dq: with the stock transport the worker ends.
@pytest.mark.parametrize("broker", ["dq"], indirect=True)
def test_a_child_that_seems_dead_when_the_connection_is_lost(
    celery_app: CeleryApp, redis_server: RedisServer
) -> None:
    with celery_app.worker("prefork", concurrency=1):
        child = celery_app.send("seem_dead").get(timeout=WAIT)
        kill_connections(redis_server.port, BROKER_DB)
        assert celery_app.send("add", 1, 1).get(timeout=WAIT) == 2
        assert celery_app.ask("stats")["pool"]["processes"] == [child]
        os.kill(child, signal.SIGKILL)
        assert celery_app.send("add", 2, 1).get(timeout=WAIT) == 3
