"""The life of a task, with its message, the concurrency slot of its tenant, and its result."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
from celery import Task, chord
from celery.exceptions import TimeLimitExceeded
from celery.result import AsyncResult

from celery_dq.inspector.claim_rates import RunningEntry
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.broker.worker_app import OpenApp, WorkerApp
from tests.workers import WorkerProcess


def limit(worker_app: WorkerApp, tenant: str, **quota: Any) -> None:
    app: Any = worker_app.app
    app.dq.quotas.set(worker_app.queue, tenant, **quota)


def has_gone(worker: WorkerProcess) -> bool:
    return not worker.alive


def is_revoked(result: AsyncResult[Any]) -> bool:
    return str(result.state) == "REVOKED"


def running(worker_app: WorkerApp) -> dict[bytes, int]:
    found: dict[bytes, bytes] = worker_app.client.hgetall(worker_app.keys.running)
    return {tenant: RunningEntry.unpack(entry).slots for tenant, entry in found.items()}


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_an_early_ack_keeps_the_slot_until_the_body_ends(worker_app: WorkerApp, pool: str) -> None:
    limit(worker_app, "7", concurrency=1)
    for key in ("a", "b"):
        worker_app.send("hold", key, tenant="7")
    worker_app.send("note", "another tenant's", tenant="8")
    with worker_app.worker(pool, 3):
        worker_app.ran(1)
        worker_app.ran(1, subject="began")
        wait_until(lambda: running(worker_app) == {b"7": 1}, 30)
        assert worker_app.witness.reports("began") == ["a"]
        worker_app.witness.release("a")
        worker_app.ran(2, subject="began")
        assert worker_app.witness.reports("ended") == ["a"]
        # Each way for a task to end frees the slot for the next.
        worker_app.witness.release("b")
        for how in ("retry", "fail", "ignore", "reject", "fine"):
            worker_app.send("outcome", how, tenant="7")
        wait_until(
            lambda: worker_app.witness.reports("began")[2:].count("fine") == 1,
            30,
            what=lambda: str(worker_app.witness.reports("began")),
        )
        wait_until(
            lambda: worker_app.witness.reports("began").count("retry") == 3,
            30,
            what=lambda: str(worker_app.witness.reports("began")),
        )
        worker_app.settled()
    assert worker_app.dead() == {}


def test_a_terminated_and_a_timed_out_task_free_their_slots(worker_app: WorkerApp) -> None:
    limit(worker_app, "7", concurrency=1)
    with worker_app.worker("prefork", 2):
        result = worker_app.send("hold", "terminated", tenant="7")
        worker_app.ran(1, subject="began")
        worker_app.wait_responsive()
        worker_app.app.control.terminate(result.id, signal="SIGKILL")
        timed_out = worker_app.send("hold", "timed out", tenant="7", time_limit=1)
        worker_app.send("note", "last", tenant="7")
        # The task may end before it reports that it began.
        wait_until(lambda: timed_out.state == "FAILURE", 30, what=lambda: timed_out.state)
        assert isinstance(timed_out.result, TimeLimitExceeded)
        worker_app.ran(1)
        worker_app.settled()
    assert worker_app.dead() == {}


def test_a_child_that_is_killed_with_the_lock_of_its_results_stops_no_worker(worker_app: WorkerApp) -> None:
    with worker_app.worker("prefork", 1) as worker:
        result = worker_app.send("end_with_lock")
        worker.wait_for_log("SIGKILL", 30)
        worker_app.send("note", "next")
        worker_app.ran(1)
        assert result.state == "SUCCESS"
        worker_app.settled()


def test_a_soft_time_limit_frees_no_slot_while_the_task_goes_on(worker_app: WorkerApp) -> None:
    limit(worker_app, "7", concurrency=1)
    with worker_app.worker("prefork", 2):
        worker_app.send("linger", "a", tenant="7", soft_time_limit=0.5)
        worker_app.ran(1, subject="warned")
        worker_app.send("note", "its own", tenant="7")
        for number in range(2):
            worker_app.send("note", number, tenant="8")
            worker_app.ran(number + 1)
        assert worker_app.witness.reports("ran") == ["0", "1"]
        worker_app.witness.release("a")
        assert worker_app.ran(3)[-1] == "its own"
        worker_app.settled()
    assert worker_app.witness.reports("warned") == worker_app.witness.reports("ended") == ["a"]


def test_a_poison_message_ends_among_the_dead_letters_and_its_neighbours_run(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("C_FORCE_ROOT", "1")  # pickle, where the tests run as root
    worker_app = open_app(dq_max_deliveries=1, accept_content=["json", "pickle"])
    with worker_app.worker("prefork", 2):
        pickled = worker_app.app.send_task("die", ("pickled",), serializer="pickle")
        header = [worker_app.app.signature("die", ("poison",)), worker_app.app.signature("note", ("member",))]
        body = worker_app.app.signature("note", ("body",)).on_error(worker_app.app.signature("errback"))
        result = chord(header, app=worker_app.app)(body)
        for n in range(5):
            worker_app.send("note", n)
        worker_app.ran(6)
        # The chord receives the failure. Billiard looks for lost children every five seconds.
        worker_app.ran(1, subject="errback")
        wait_until(lambda: result.state == "FAILURE", 30, what=lambda: result.state)
        wait_until(lambda: pickled.state == "FAILURE", 30, what=lambda: pickled.state)
        wait_until(lambda: len(worker_app.dead()) == 2, 30)
        worker_app.settled()
        assert sorted(worker_app.witness.reports("began")) == ["pickled", "poison"]
        assert all(b"max_deliveries" in info for info in worker_app.dead().values())


@pytest.mark.logged_error("DB index is out of range")
def test_a_worker_whose_result_backend_refuses_gives_up_on_a_message_and_goes_on(
    worker_app: WorkerApp, open_app: OpenApp, redis_server: RedisServer
) -> None:
    no_such_database = f"redis://127.0.0.1:{redis_server.port}/99"
    refused = open_app(
        task_default_queue=worker_app.queue, result_backend=no_such_database, dq_max_deliveries=1
    )
    with refused.worker("prefork", 1) as worker:
        worker_app.send("die", "poison")
        worker.wait_for_log("Could not record the failure", 30)
        wait_until(lambda: len(worker_app.dead()) == 1, 30)
        worker_app.send("note", "neighbour", ignore_result=True)
        assert worker_app.ran(1) == ["neighbour"]
        assert worker.alive
        worker_app.settled()


def test_solo_poison_kills_workers_only_so_often(open_app: OpenApp) -> None:
    worker_app = open_app(dq_max_deliveries=2)
    worker_app.send("die", "poison")
    worker_app.send("note", "neighbour")
    results = worker_app.send("die", "poison")
    workers = 0
    while len(worker_app.witness.reports("began")) < 4:
        with worker_app.worker("solo", 1) as worker:
            workers += 1
            wait_until(partial(has_gone, worker), 30)
        assert workers < 6
    with worker_app.worker("solo", 1):
        wait_until(lambda: len(worker_app.dead()) == 2, 30, what=lambda: str(worker_app.dead()))
        wait_until(lambda: results.state == "FAILURE", 30)
        worker_app.ran(1)
        worker_app.settled()
    assert worker_app.witness.reports("began") == ["poison"] * 4


@pytest.mark.logged_error("kombu.exceptions.DecodeError", "kombu.exceptions.ContentDisallowed")
def test_a_message_that_cannot_run_becomes_a_dead_letter(worker_app: WorkerApp) -> None:
    worker_app.app.send_task("unknown.task", (1,))
    with worker_app.app.connection_for_write() as connection:
        producer = connection.Producer()
        producer.publish(
            "{not json",
            routing_key=worker_app.queue,
            content_type="application/json",
            content_encoding="utf-8",
        )
        producer.publish(
            b"\x80\x05bytes",
            routing_key=worker_app.queue,
            content_type="application/x-python-serialize",
            content_encoding="binary",
            headers={"task": "note", "id": "pickled"},
        )
        producer.publish({"hello": "world"}, routing_key=worker_app.queue, serializer="json")
    with worker_app.worker("threads", 1):
        worker_app.send("note", "fine")
        worker_app.ran(1)
        wait_until(lambda: len(worker_app.dead()) == 4, 30, what=lambda: str(worker_app.dead()))
        worker_app.settled()


@pytest.mark.logged_error("it is not a valid task")
def test_a_request_that_the_pool_cannot_take_keeps_no_slot(worker_app: WorkerApp) -> None:
    with worker_app.app.connection_for_write() as connection:
        for task_id in ("first", "second"):
            headers = {"task": "note", "id": task_id, "timelimit": 5}
            body: list[Any] = [[task_id], {}, {}]
            connection.Producer().publish(
                body, routing_key=worker_app.queue, serializer="json", headers=headers
            )
    with worker_app.worker("prefork", 1):
        worker_app.send("note", "fine")
        assert worker_app.ran(1) == ["fine"]
        wait_until(lambda: len(worker_app.dead()) == 2, 30, what=lambda: str(worker_app.dead()))
        worker_app.settled()


def test_a_message_whose_ack_another_library_replaces_is_a_valid_task(worker_app: WorkerApp) -> None:
    worker_app.conf["wraps_acks"] = True
    with worker_app.worker("threads", 1):
        worker_app.send("note", "fine")
        worker_app.settled()
        # An ack that is not celery-dq's own goes through Celery's event loop, which may turn after the end.
        assert worker_app.ran(1, subject="acked") == ["note"]
    assert (worker_app.dead(), worker_app.witness.reports("ran")) == ({}, ["fine"])


def test_cancel_waiting_delayed_and_running(worker_app: WorkerApp) -> None:
    waiting, delayed = worker_app.send("note", "waiting"), worker_app.send("note", "delayed", countdown=60)
    expired = worker_app.send("note", "expired", expires=0.2)
    unborn = "00000000-0000-0000-0000-000000000001"
    worker_app.app.control.revoke([waiting.id, delayed.id, unborn])
    worker_app.send("note", "unborn", task_id=unborn)
    partition = Partition(worker_app.keys, load_scripts())
    assert partition.cancel([waiting.id]).run(worker_app.client) in (["discarded"], ["waiting"])
    due = time.time() + 0.25
    wait_until(lambda: time.time() > due)
    with worker_app.worker("threads", 1):
        worker_app.send("note", "fine")
        assert worker_app.ran(1) == ["fine"]
        for result in (waiting, delayed, expired, worker_app.app.AsyncResult(unborn)):
            wait_until(partial(is_revoked, result), 30, what=partial(getattr, result, "state"))
        worker_app.settled()
    assert worker_app.witness.reports("ran") == ["fine"]


def test_a_worker_leaves_messages_beyond_its_slots_to_others(worker_app: WorkerApp) -> None:
    for key in "abcdef":
        worker_app.send("hold", key)
    with worker_app.worker("threads", 2):
        worker_app.ran(2, subject="began")
        with worker_app.worker("threads", 4):
            worker_app.ran(6, subject="began")
            for key in "abcdef":
                worker_app.witness.release(key)
            worker_app.ran(6, subject="ended")


def test_an_autoscaled_pool_grows_to_its_maximum_and_no_further(worker_app: WorkerApp) -> None:
    arguments = ("--without-mingle", "--without-gossip", "--without-heartbeat", "--autoscale=3,1")
    worker_app.conf["worker_prefetch_multiplier"] = 1
    with worker_app.worker("prefork", 1, arguments=arguments) as worker:
        for key in "abcd":
            worker_app.send("hold", key)
        worker_app.ran(3, subject="began")
        assert len(worker.children()) >= 3
        with worker_app.worker("threads", 1):
            # The fourth task was left to the other worker.
            worker_app.ran(4, subject="began")
        for key in "abcd":
            worker_app.witness.release(key)
        worker_app.ran(3, subject="ended")


@pytest.mark.parametrize(("task", "runs"), [("stumble", []), ("stumble_late", ["first"])])
def test_a_connection_that_is_lost_when_a_solo_task_starts_holds_no_slot(
    worker_app: WorkerApp, task: str, runs: list[str]
) -> None:
    limit(worker_app, "7", concurrency=1)
    with worker_app.worker("solo", 1) as worker:
        worker_app.send(task, "first", tenant="7")
        worker.wait_for_log("Connected to", 30, occurrences=2)
        worker_app.send("note", "next", tenant="7")
        # A message without an ack comes back, and one that was acknowledged early is over.
        assert worker_app.ran(len(runs) + 1) == [*runs, "next"]
        worker_app.settled()


if hasattr(Task, "retry_on_worker_lost"):  # since Celery 5.7

    @pytest.mark.parametrize("task", ["die_once", "die_once_late"])
    def test_a_retry_after_a_lost_process_keeps_its_tenant_and_is_not_buffered(
        open_app: OpenApp, task: str
    ) -> None:
        in_memory = {"dq_buffer_folder": "", "dq_buffer_linger": "60s"}
        worker_app = open_app(dq_buffer=True, dq_buffer_in_workers=True, **in_memory)
        worker_app.send(task, tenant="vip", buffered=False)
        with worker_app.worker("prefork", 1):
            assert worker_app.ran(2, subject="tenant") == ["vip", "vip"]
