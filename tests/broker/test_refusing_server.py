"""Redis refuses commands for a while: workers wait, go on, and log it once. They empty a full one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.home import home_of
from tests.broker.worker_app import OpenApp, WorkerApp
from tests.producer.test_refusals import busy, full, short_of_replicas, unable_to_save
from tests.workers import WorkerProcess

REFUSALS = {
    "MISCONF": unable_to_save,
    "NOREPLICAS": short_of_replicas,
    "BUSY": busy,
}


@pytest.fixture(scope="module")
def refusing_server() -> Iterator[RedisServer]:
    with RedisServer(config={"maxmemory-policy": "noeviction"}) as server:
        yield server


@pytest.fixture
def admin(refusing_server: RedisServer) -> Iterator[Any]:
    with redis.Redis(port=refusing_server.port, socket_timeout=20) as client:
        client.flushall()
        client.config_resetstat()
        yield client


@pytest.fixture
def worker_app(open_app: OpenApp, refusing_server: RedisServer) -> WorkerApp:
    """Tasks report on another server than the one that refuses."""
    queues = {"many": {"partitions": 2}}
    worker_app = open_app(port=refusing_server.port, dq_queues=queues, dq_default_quota={"concurrency": 5})
    worker_app.client = redis.Redis(port=refusing_server.port, db=1)
    return worker_app


@pytest.mark.parametrize("arguments", [(), ("--without-mingle", "--without-gossip", "--without-heartbeat")])
def test_a_worker_that_starts_while_redis_is_full_empties_the_queue(
    worker_app: WorkerApp, admin: Any, arguments: tuple[str, ...]
) -> None:
    for n in range(5):
        worker_app.send("note", n)
    with full(admin), worker_app.worker("threads", 1, arguments=arguments) as worker:
        assert sorted(worker_app.ran(5)) == [*"01234"]
        assert "The memory of Redis is full" in worker.log
        worker_app.settled()


def tenant_at(partition: int) -> str:
    """A tenant of this partition of the queue with two."""
    return next(name for name in map(str, range(99)) if home_of(name, 2) == partition)


def refuse(name: str, admin: Any, worker: WorkerProcess) -> None:
    """Wait until Redis has refused several commands of a worker."""
    if name == "BUSY":  # it answers no question
        worker.wait_for_log("Redis runs a script")
        return

    def refused() -> bool:
        errors = admin.info("errorstats")
        return sum(int(each["count"]) for key, each in errors.items() if name in key) > 4

    wait_until(refused, 30, what=lambda: f"{admin.info('errorstats')}; {worker.log}")


def test_a_worker_of_several_queues_empties_a_full_redis(worker_app: WorkerApp, admin: Any) -> None:
    queues = [worker_app.queue, "many"]
    with worker_app.worker("threads", 1, queues=queues) as worker:
        worker_app.send("hold", "first")
        worker_app.ran(1, subject="began")
        for queue in (*queues, worker_app.queue, "many"):
            worker_app.send("nap", 0.3, queue=queue)
        with full(admin):
            worker_app.witness.release("first")
            worker_app.ran(5, subject="ended")
            worker_app.settled()
            assert worker.alive
            assert "Traceback" not in worker.log


@pytest.mark.parametrize("queues", [[], ["many", "other"]])
def test_a_worker_goes_on_after_each_refusal(worker_app: WorkerApp, admin: Any, queues: list[str]) -> None:
    # A message in each partition: a refused claim of an idle one would be repeated after ten seconds.
    places = [("many", ""), ("many", tenant_at(1)), ("other", "")] if queues else [(worker_app.queue, "")]
    queue = places[0][0]
    with worker_app.worker("threads", 1, queues=queues) as worker:
        for number, (name, refusal) in enumerate(REFUSALS.items(), 1):
            worker_app.send("hold_late", name, queue=queue)
            worker_app.ran(number, subject="began")
            with refusal(admin):
                worker_app.witness.release(name)
                refuse(name, admin, worker)
            for place, tenant in places:
                worker_app.send("note", name, queue=place, tenant=tenant)
            worker_app.ran(number * len(places))
            # The last refused command may be accepted after the task.
            worker.wait_for_log("Redis accepts the commands", occurrences=number)
        assert worker.log.count("Redis refuses commands") == len(REFUSALS)
        assert "Traceback" not in worker.log
    assert worker_app.witness.reports("ran") == [name for name in REFUSALS for _ in places]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_worker_that_starts_waits_until_redis_takes_writes(
    worker_app: WorkerApp, admin: Any, name: str
) -> None:
    worker_app.send("note", name)
    worker = worker_app.worker("threads", 1, queues=[worker_app.queue, "many"])
    with ExitStack() as stack:
        with REFUSALS[name](admin):
            stack.push(worker.start().__exit__)
            # Celery waits for a connection; for the declaration of a queue, the channel does.
            worker.wait_for_log("Redis refuses commands" if name == "NOREPLICAS" else "Cannot connect")
        assert worker_app.ran(1) == [name]
        assert "Traceback" not in worker.log


def test_a_worker_subscribes_again_after_redis_has_refused_it(worker_app: WorkerApp, admin: Any) -> None:
    with worker_app.worker("threads", 1) as worker:
        worker_app.send("note", 1)
        worker_app.ran(1)
        # Redis ends the connections of the subscribers, too.
        admin.execute_command("ACL", "SETUSER", "default", "resetchannels")
        try:
            worker.wait_for_log("the subscription to broadcasts first")
        finally:
            admin.execute_command("ACL", "SETUSER", "default", "allchannels")
        worker.wait_for_log("Redis accepts the commands")
        assert "could not be handled" not in worker.log
        wait_until(lambda: worker_app.app.control.ping(timeout=1), 30, what=lambda: worker.log)
