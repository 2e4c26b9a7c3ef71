"""Neighbours and accidents: mingle and gossip, a broker that restarts, messages that no worker can read."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from uuid import uuid4

import pytest
from kombu import Connection, Producer

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import Broker
from tests.conformance.mailroom import kill_connections, on_redis
from tests.conformance.shop import BROKER_DB
from tests.conformance.workplace import Workplace
from tests.workers import WorkerProcess

WAIT = 30


def newcomer(workplace: Workplace) -> WorkerProcess:
    """A second worker that has met the first one: Celery waits one second for answers, whoever is busy."""
    for number in range(5):
        second = workplace.worker("threads", name=f"second{number}", arguments=())
        try:
            second.start().wait_ready()
            if "mingle: all alone" not in second.log:
                return second
        except BaseException:
            second.discard()
            raise
        second.discard()
    raise TimeoutError("nobody has answered the newcomers")


@on_redis
def test_two_workers_mingle_and_gossip(workplace: Workplace) -> None:
    with workplace.worker("threads", name="first", arguments=(), loglevel="DEBUG") as first:
        revoked = uuid4().hex
        # A broadcast reaches nobody who has not subscribed yet: that he consumes does not say that he has.
        workplace.ask("ping")
        workplace.app.control.revoke(revoked)
        wait_until(lambda: revoked in workplace.ask("revoked"), WAIT)
        with ExitStack() as stack:
            second = newcomer(workplace)
            stack.push(second)
            # mingle: the newcomer learns what was revoked before it came
            second.wait_for_log("mingle: sync with 1 nodes")
            second.wait_for_log("mingle: sync complete")
            assert revoked in workplace.ask("revoked", destinations=[second.name])
            # gossip: the first one hears of the newcomer, and of its going
            first.wait_for_log(f"{second.name} joined the party", WAIT)
            results = [workplace.send("add", number, 1) for number in range(20)]
            assert [result.get(timeout=WAIT) for result in results] == list(range(1, 21))
            second.stop()
        first.wait_for_log(f"{second.name} left", WAIT)


@on_redis
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_worker_survives_the_loss_of_its_connections(
    workplace: Workplace, redis_server: RedisServer, pool: str
) -> None:
    with workplace.worker(pool):
        assert workplace.send("add", 1, 1).get(timeout=WAIT) == 2
        kill_connections(redis_server.port, BROKER_DB)
        results = [workplace.send("add", number, 1) for number in range(5)]
        assert [result.get(timeout=WAIT) for result in results] == [1, 2, 3, 4, 5]


@on_redis
def test_a_task_that_runs_while_the_connection_is_lost(
    workplace: Workplace, redis_server: RedisServer
) -> None:
    key = uuid4().hex
    with workplace.worker("prefork", concurrency=2) as worker:
        result = workplace.send("hold_late", key)
        workplace.witness.wait(f"started:{key}")
        kill_connections(redis_server.port, BROKER_DB)
        worker.wait_for_log("Connection to broker lost")
        if workplace.broker.expected("a blip does not run a task twice", True):
            assert workplace.send("add", 1, 1).get(timeout=WAIT) == 2
            assert workplace.witness.told(f"started:{key}") == []
            workplace.witness.release(key)
        else:
            workplace.witness.wait(f"started:{key}")
            workplace.witness.release(key, 2)
        assert result.get(timeout=WAIT) == key
    assert workplace.waiting() == 0


@on_redis
def test_a_broker_restart(broker: Broker) -> None:
    with RedisServer(appendonly=True) as server:
        workplace = Workplace(broker, server)
        with workplace.worker("prefork") as worker:
            assert workplace.send("add", 1, 1).get(timeout=WAIT) == 2
            server.kill()
            worker.wait_for_log("Connection to broker lost")
            server.restart()
            result = workplace.send("add", 2, 2)
            assert result.get(timeout=WAIT) == 4
        workplace.close()


def test_an_unknown_task_is_dropped(workplace: Workplace) -> None:
    with workplace.worker("prefork") as worker:
        workplace.app.send_task("nobody.knows", queue=workplace.queue)
        worker.wait_for_log("Received unregistered task")
        assert workplace.send("add", 1, 1).get(timeout=WAIT) == 2
    assert workplace.waiting() == 0


def test_a_message_that_is_no_task_is_dropped(workplace: Workplace) -> None:
    with Connection(workplace.conf["broker_url"]) as connection:
        producer = Producer(connection.channel())
        producer.publish(
            "{ not json",
            content_type="application/json",
            content_encoding="utf-8",
            serializer=None,
            routing_key=workplace.queue,
        )
        producer.publish({"no": "task"}, routing_key=workplace.queue, serializer="json")
        producer.publish([1, 2, 3], routing_key=workplace.queue, serializer="pickle")
    with workplace.worker("prefork") as worker:
        assert workplace.send("add", 1, 1).get(timeout=WAIT) == 2
        worker.wait_for_log("Received and deleted unknown message")
        worker.wait_for_log("Can't decode message body")
    assert workplace.waiting() == 0


def test_messages_of_the_first_protocol(workplace: Workplace) -> None:
    subject = uuid4().hex
    body = {"task": "tell", "id": uuid4().hex, "args": [subject, "old style"], "kwargs": {}, "retries": 0}
    with workplace.worker("solo"), Connection(workplace.conf["broker_url"]) as connection:
        Producer(connection.channel()).publish(body, routing_key=workplace.queue, serializer="json")
        assert workplace.witness.wait(subject) == "old style"


# Only there: the stock transport now and then has a worker that does not end after this.
@pytest.mark.parametrize("broker", ["dq"], indirect=True)
@pytest.mark.parametrize("state", ["not read", "running"])
def test_a_child_dies_while_the_connection_is_lost(
    workplace: Workplace, redis_server: RedisServer, state: str
) -> None:
    key = uuid4().hex
    with workplace.worker("prefork", concurrency=1) as worker:
        (child,) = workplace.ask("stats")["pool"]["processes"]
        if state == "not read":
            os.kill(child, signal.SIGSTOP)
        result = workplace.send("hold_or_die", key)
        if state == "running":
            workplace.witness.wait(f"started:{key}")
        else:
            worker.wait_for_log(result.id)
        # When the worker learns of both at once
        os.kill(worker.pid, signal.SIGSTOP)
        os.kill(child, signal.SIGKILL)
        kill_connections(redis_server.port, BROKER_DB)
        os.kill(worker.pid, signal.SIGCONT)
        # Then another child gets what the first one had.
        workplace.witness.wait(f"started:{key}", WAIT)
        workplace.witness.release(key)
        assert result.get(timeout=WAIT) == key
    assert workplace.waiting() == 0


# Only there: with the stock transport the worker ends.
@pytest.mark.parametrize("broker", ["dq"], indirect=True)
def test_a_child_that_seems_dead_when_the_connection_is_lost(
    workplace: Workplace, redis_server: RedisServer
) -> None:
    with workplace.worker("prefork", concurrency=1):
        child = workplace.send("seem_dead").get(timeout=WAIT)
        kill_connections(redis_server.port, BROKER_DB)
        assert workplace.send("add", 1, 1).get(timeout=WAIT) == 2
        assert workplace.ask("stats")["pool"]["processes"] == [child]
        os.kill(child, signal.SIGKILL)
        assert workplace.send("add", 2, 1).get(timeout=WAIT) == 3
