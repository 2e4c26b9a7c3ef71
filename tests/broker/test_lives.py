"""What the life of a task does to its message, its tenant's slot and its result."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
from celery import chord
from celery.exceptions import TimeLimitExceeded
from celery.result import AsyncResult

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.partition import Partition, load_scripts
from tests.broker.yard import Yard
from tests.workers import WorkerProcess


def limit(yard: Yard, tenant: str, **quota: Any) -> None:
    app: Any = yard.app
    app.dq.quotas.set(yard.queue, tenant, **quota)


def has_gone(worker: WorkerProcess) -> bool:
    return not worker.alive


def is_revoked(result: AsyncResult[Any]) -> bool:
    return str(result.state) == "REVOKED"


def running(yard: Yard) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = yard.client.hgetall(yard.keys.running)
    return found


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_an_early_ack_keeps_the_slot_until_the_body_ends(yard: Yard, pool: str) -> None:
    limit(yard, "7", concurrency=1)
    for key in ("a", "b"):
        yard.send("hold", key, tenant="7")
    yard.send("note", "another tenant's", tenant="8")
    with yard.worker(pool, 3):
        yard.ran(1)
        yard.ran(1, subject="began")
        wait_until(lambda: running(yard) == {b"7": b"1"}, 30)
        assert yard.witness.told("began") == ["a"]
        yard.witness.release("a")
        yard.ran(2, subject="began")
        assert yard.witness.told("ended") == ["a"]
        # Each way for a task to end frees the slot for the next.
        yard.witness.release("b")
        for how in ("retry", "fail", "ignore", "reject", "fine"):
            yard.send("outcome", how, tenant="7")
        wait_until(
            lambda: yard.witness.told("began")[2:].count("fine") == 1,
            30,
            what=lambda: str(yard.witness.told("began")),
        )
        wait_until(
            lambda: yard.witness.told("began").count("retry") == 3,
            30,
            what=lambda: str(yard.witness.told("began")),
        )
        yard.settled()
    assert yard.dead() == {}


def test_a_terminated_and_a_timed_out_task_free_their_slots(yard: Yard) -> None:
    limit(yard, "7", concurrency=1)
    with yard.worker("prefork", 2):
        result = yard.send("hold", "terminated", tenant="7")
        yard.ran(1, subject="began")
        yard.is_heard()
        yard.app.control.terminate(result.id, signal="SIGKILL")
        timed_out = yard.send("hold", "timed out", tenant="7", time_limit=1)
        yard.send("note", "last", tenant="7")
        # It may be ended before it has said that it began.
        wait_until(lambda: timed_out.state == "FAILURE", 30, what=lambda: timed_out.state)
        assert isinstance(timed_out.result, TimeLimitExceeded)
        yard.ran(1)
        yard.settled()
    assert yard.dead() == {}


def test_a_poison_message_ends_among_the_dead_letters_and_its_neighbours_run(
    redis_server: RedisServer,
) -> None:
    for db in (1, 2, 3):
        redis_server.flush(db)
    yard = Yard(redis_server, dq_max_deliveries=1)
    with yard.worker("prefork", 2):
        header = [yard.app.signature("die", ("poison",)), yard.app.signature("note", ("member",))]
        body = yard.app.signature("note", ("body",)).on_error(yard.app.signature("errback"))
        result = chord(header, app=yard.app)(body)
        for n in range(5):
            yard.send("note", n)
        yard.ran(6)
        # billiard looks for lost children every five seconds
        # The chord hears of it.
        yard.ran(1, subject="errback")
        wait_until(lambda: result.state == "FAILURE", 30, what=lambda: result.state)
        wait_until(lambda: len(yard.dead()) == 1, 30)
        yard.settled()
        assert yard.witness.told("began") == ["poison"]
        assert b"max_deliveries" in next(iter(yard.dead().values()))
    yard.close()


def test_solo_poison_kills_workers_only_so_often(redis_server: RedisServer) -> None:
    for db in (1, 2, 3):
        redis_server.flush(db)
    yard = Yard(redis_server, dq_max_deliveries=2)
    yard.send("die", "poison")
    yard.send("note", "neighbour")
    results = yard.send("die", "poison")
    workers = 0
    while len(yard.witness.told("began")) < 4:
        with yard.worker("solo", 1) as worker:
            workers += 1
            wait_until(partial(has_gone, worker), 30)
        assert workers < 6
    with yard.worker("solo", 1):
        wait_until(lambda: len(yard.dead()) == 2, 30, what=lambda: str(yard.dead()))
        wait_until(lambda: results.state == "FAILURE", 30)
        yard.ran(1)
        yard.settled()
    assert yard.witness.told("began") == ["poison"] * 4
    yard.close()


def test_what_cannot_run_becomes_a_dead_letter(yard: Yard) -> None:
    yard.app.send_task("nobody.knows", (1,))
    with yard.app.connection_for_write() as connection:
        producer = connection.Producer()
        producer.publish(
            "{not json", routing_key=yard.queue, content_type="application/json", content_encoding="utf-8"
        )
        producer.publish(
            b"\x80\x05bytes",
            routing_key=yard.queue,
            content_type="application/x-python-serialize",
            content_encoding="binary",
            headers={"task": "note", "id": "pickled"},
        )
        producer.publish({"hello": "world"}, routing_key=yard.queue, serializer="json")
    with yard.worker("threads", 1):
        yard.send("note", "fine")
        yard.ran(1)
        wait_until(lambda: len(yard.dead()) == 4, 30, what=lambda: str(yard.dead()))
        yard.settled()


def test_cancel_waiting_delayed_and_running(yard: Yard) -> None:
    waiting, delayed = yard.send("note", "waiting"), yard.send("note", "delayed", countdown=60)
    expired = yard.send("note", "expired", expires=0.2)
    unborn = "00000000-0000-0000-0000-000000000001"
    yard.app.control.revoke([waiting.id, delayed.id, unborn])
    yard.send("note", "unborn", task_id=unborn)
    partition = Partition(yard.keys, load_scripts())
    assert partition.cancel([waiting.id]).run(yard.client) in (["discarded"], ["waiting"])
    due = time.time() + 0.25
    wait_until(lambda: time.time() > due)
    with yard.worker("threads", 1):
        yard.send("note", "fine")
        assert yard.ran(1) == ["fine"]
        for result in (waiting, delayed, expired, yard.app.AsyncResult(unborn)):
            wait_until(partial(is_revoked, result), 30, what=partial(getattr, result, "state"))
        yard.settled()
    assert yard.witness.told("ran") == ["fine"]
