"""Inspecting, controlling and listening to a running worker, in every pool that can answer while it works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import TaskRevokedError

from celery_dq.testing.waiting import wait_until
from tests.conformance.celery_app import CeleryApp

WAIT = 30


@pytest.fixture(scope="module", params=["prefork", "gevent"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def the_worker_listens(staffed_app: CeleryApp) -> None:
    """Wait for the worker's mailbox, which opens after the worker has reported that it consumes."""
    staffed_app.ask("ping")


@pytest.fixture
def held(staffed_app: CeleryApp) -> Iterator[tuple[str, Any]]:
    """A task that runs until the test ends."""
    key = uuid4().hex
    result = staffed_app.send("hold", key)
    staffed_app.witness.wait(f"started:{key}")
    yield key, result
    staffed_app.witness.release(key)
    result.get(timeout=WAIT)


def test_ping_through_control(staffed_app: CeleryApp) -> None:
    worker = staffed_app.shared_worker
    assert worker is not None
    control = staffed_app.app.control
    wait_until(lambda: {worker.name: {"ok": "pong"}} in (control.ping(timeout=5, limit=1) or ()), WAIT)


def test_registered_and_stats(staffed_app: CeleryApp) -> None:
    assert "add" in staffed_app.ask("registered")
    stats = staffed_app.ask("stats")
    assert stats["broker"]["transport"] == staffed_app.broker.scheme
    assert stats["pool"]["max-concurrency"] == 2
    assert staffed_app.ask("active_queues")[0]["name"] == staffed_app.queue


def test_active_and_query(staffed_app: CeleryApp, held: tuple[str, Any]) -> None:
    _, result = held
    # The task reports that it runs before its worker knows it.
    wait_until(lambda: [task["id"] for task in staffed_app.ask("active")] == [result.id], WAIT)
    state, request = staffed_app.ask("query_task", result.id)[result.id]
    assert (state, request["name"]) == ("active", "hold")


def test_scheduled_or_waiting_in_the_broker(staffed_app: CeleryApp) -> None:
    result = staffed_app.send("report", uuid4().hex, countdown=600)
    # The stock transport keeps delayed tasks in a worker; a broker that supports delays keeps them itself.
    if staffed_app.broker.expected("delayed tasks wait in the broker", True):
        assert staffed_app.send("add", 1, 1).get(timeout=WAIT) == 2
        assert staffed_app.ask("scheduled") == []
    else:
        wait_until(
            lambda: [row["request"]["id"] for row in staffed_app.ask("scheduled")] == [result.id], WAIT
        )
    result.revoke()


def test_revoking_a_queued_task(staffed_app: CeleryApp, pool: str) -> None:
    keys = [uuid4().hex for _ in range(2)]
    held = [staffed_app.send("hold", key) for key in keys]
    for key in keys:
        staffed_app.witness.wait(f"started:{key}")
    subject = uuid4().hex
    victim = staffed_app.send("report", subject)
    stops = staffed_app.broker.expected(f"a revoke stops what waits for a slot ({pool})", True)
    if not stops:
        # A revoke before the worker has received the task would test another path.
        wait_until(lambda: staffed_app.ask("query_task", victim.id), WAIT)
    victim.revoke()
    wait_until(lambda: victim.id in staffed_app.ask("revoked"), WAIT)
    for key in keys:
        staffed_app.witness.release(key)
    for result in held:
        result.get(timeout=WAIT)
    staffed_app.let_pass(victim.id, WAIT)
    assert staffed_app.witness.reports(subject) == ([] if stops else [""])
    if stops:
        with pytest.raises(TaskRevokedError):
            victim.get(timeout=WAIT)


def test_revoking_before_publishing(staffed_app: CeleryApp) -> None:
    task_id, subject = uuid4().hex, uuid4().hex
    staffed_app.app.control.revoke(task_id)
    wait_until(lambda: task_id in staffed_app.ask("revoked"), WAIT)
    with pytest.raises(TaskRevokedError):
        staffed_app.send("report", subject, task_id=task_id).get(timeout=WAIT)
    staffed_app.let_pass(task_id, WAIT)
    assert staffed_app.witness.reports(subject) == []


def test_reserved(staffed_app: CeleryApp) -> None:
    keys = [uuid4().hex for _ in range(2)]
    results = [staffed_app.send("hold", key) for key in keys]
    for key in keys:
        staffed_app.witness.wait(f"started:{key}")
    results.append(staffed_app.send("add", 1, 1))
    # The unstarted message is either prefetched by the worker, or in the queue.
    wait_until(lambda: len(staffed_app.ask("reserved")) + staffed_app.waiting() == 1, WAIT)
    for key in keys:
        staffed_app.witness.release(key)
    for result in results:
        result.get(timeout=WAIT)


def test_a_rate_limited_task_waits(staffed_app: CeleryApp) -> None:
    staffed_app.order("rate_limit", "report", "4/s")
    subject = uuid4().hex
    results = [staffed_app.send("report", subject) for _ in range(3)]
    # A rate-limited task does not delay others.
    assert staffed_app.send("add", 1, 1).get(timeout=WAIT) == 2
    for result in results:
        result.get(timeout=WAIT)
    assert len(staffed_app.witness.reports(subject)) == 3
    staffed_app.order("rate_limit", "report", None)


def test_add_and_cancel_consumer(staffed_app: CeleryApp) -> None:
    queue, subject = f"{staffed_app.queue}-extra", uuid4().hex
    staffed_app.order("add_consumer", queue)
    staffed_app.send("report", subject, "first", queue=queue)
    assert staffed_app.witness.wait(subject) == "first"
    staffed_app.order("cancel_consumer", queue)
    wait_until(lambda: [row["name"] for row in staffed_app.ask("active_queues")] == [staffed_app.queue], WAIT)
    staffed_app.send("report", subject, "second", queue=queue)
    assert staffed_app.send("add", 1, 1).get(timeout=WAIT) == 2
    assert staffed_app.witness.reports(subject) == []
    # The message waits for the next consumer.
    staffed_app.order("add_consumer", queue)
    assert staffed_app.witness.wait(subject) == "second"
    staffed_app.order("cancel_consumer", queue)


def test_events(staffed_app: CeleryApp) -> None:
    wanted = {"task-received", "task-started", "task-succeeded"}
    seen: dict[str, set[str]] = {}
    received = threading.Event()

    def publish() -> None:
        # An event reaches only present subscribers: publish until all events of one task arrived.
        while not received.wait(0.2):
            staffed_app.send("add", 1, 1)

    def on_event(event: dict[str, Any]) -> None:
        types = seen.setdefault(event.get("uuid", ""), set())
        types.add(event["type"])
        if wanted <= types:
            received.set()
            receiver.should_stop = True

    publisher = threading.Thread(target=publish)
    with staffed_app.app.connection_for_read() as connection:
        receiver = staffed_app.app.events.Receiver(connection, handlers={"*": on_event})
        publisher.start()
        try:
            receiver.capture(limit=None, timeout=WAIT, wakeup=False)
        finally:
            received.set()
            publisher.join()
    assert any(wanted <= types for types in seen.values()), seen


def test_the_purge_command(staffed_app: CeleryApp) -> None:
    queue = f"{staffed_app.queue}-purged"
    for number in range(4):
        staffed_app.send("add", number, 1, queue=queue)
    reported = staffed_app.command("purge", "-f", "-Q", queue)
    assert "Purged 4 messages" in reported


def test_the_amqp_command(staffed_app: CeleryApp) -> None:
    reported = staffed_app.command("amqp", "queue.declare", f"{staffed_app.queue}-amqp")
    assert f"{staffed_app.queue}-amqp" in reported


def test_the_inspect_command(staffed_app: CeleryApp) -> None:
    worker = staffed_app.shared_worker
    assert worker is not None
    # A command with named workers returns when all of them have answered.
    assert "pong" in staffed_app.command("inspect", "ping", "-t", "20", "-d", worker.name)
