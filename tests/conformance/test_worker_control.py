"""Inspecting, controlling and listening to a running worker, in every pool that can answer while it works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import TaskRevokedError

from celery_dq.testing.waiting import wait_until
from tests.conformance.workplace import Workplace

WAIT = 30


@pytest.fixture(scope="module", params=["prefork", "gevent"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def the_worker_listens(staffed: Workplace) -> None:
    """It says that it consumes before its mailbox is open, and what is sent to all by then reaches nobody."""
    staffed.ask("ping")


@pytest.fixture
def held(staffed: Workplace) -> Iterator[tuple[str, Any]]:
    """A task that runs until the test ends."""
    key = uuid4().hex
    result = staffed.send("hold", key)
    staffed.witness.wait(f"started:{key}")
    yield key, result
    staffed.witness.release(key)
    result.get(timeout=WAIT)


def test_ping(staffed: Workplace) -> None:
    assert staffed.ask("ping") == {"ok": "pong"}


def test_ping_through_control(staffed: Workplace) -> None:
    worker = staffed.shared_worker
    assert worker is not None
    control = staffed.app.control
    wait_until(lambda: {worker.name: {"ok": "pong"}} in (control.ping(timeout=5, limit=1) or ()), WAIT)


def test_registered_and_stats(staffed: Workplace) -> None:
    assert "add" in staffed.ask("registered")
    stats = staffed.ask("stats")
    assert stats["broker"]["transport"] == staffed.broker.scheme
    assert stats["pool"]["max-concurrency"] == 2
    assert staffed.ask("active_queues")[0]["name"] == staffed.queue


def test_active_and_query(staffed: Workplace, held: tuple[str, Any]) -> None:
    _, result = held
    # The task tells that it runs before its worker hears of it.
    wait_until(lambda: [task["id"] for task in staffed.ask("active")] == [result.id], WAIT)
    state, request = staffed.ask("query_task", result.id)[result.id]
    assert (state, request["name"]) == ("active", "hold")


def test_scheduled_or_waiting_in_the_broker(staffed: Workplace) -> None:
    result = staffed.send("tell", uuid4().hex, countdown=600)
    # Stock gathers delayed tasks in a worker; a broker with delays of its own keeps them.
    if staffed.broker.expected("delayed tasks wait in the broker", True):
        assert staffed.send("add", 1, 1).get(timeout=WAIT) == 2
        assert staffed.ask("scheduled") == []
    else:
        wait_until(lambda: [row["request"]["id"] for row in staffed.ask("scheduled")] == [result.id], WAIT)
    result.revoke()


def test_revoking_a_queued_task(staffed: Workplace, pool: str) -> None:
    keys = [uuid4().hex for _ in range(2)]
    held = [staffed.send("hold", key) for key in keys]
    for key in keys:
        staffed.witness.wait(f"started:{key}")
    subject = uuid4().hex
    victim = staffed.send("tell", subject)
    stops = staffed.broker.expected(f"a revoke stops what waits for a slot ({pool})", True)
    if not stops:
        # It is stopped where it was not received yet: that is not meant.
        wait_until(lambda: staffed.ask("query_task", victim.id), WAIT)
    victim.revoke()
    wait_until(lambda: victim.id in staffed.ask("revoked"), WAIT)
    for key in keys:
        staffed.witness.release(key)
    for result in held:
        result.get(timeout=WAIT)
    staffed.let_pass(victim.id, WAIT)
    assert staffed.witness.told(subject) == ([] if stops else [""])
    if stops:
        with pytest.raises(TaskRevokedError):
            victim.get(timeout=WAIT)


def test_revoking_before_publishing(staffed: Workplace) -> None:
    task_id, subject = uuid4().hex, uuid4().hex
    staffed.app.control.revoke(task_id)
    wait_until(lambda: task_id in staffed.ask("revoked"), WAIT)
    with pytest.raises(TaskRevokedError):
        staffed.send("tell", subject, task_id=task_id).get(timeout=WAIT)
    staffed.let_pass(task_id, WAIT)
    assert staffed.witness.told(subject) == []


def test_reserved(staffed: Workplace) -> None:
    keys = [uuid4().hex for _ in range(2)]
    results = [staffed.send("hold", key) for key in keys]
    for key in keys:
        staffed.witness.wait(f"started:{key}")
    results.append(staffed.send("add", 1, 1))
    # What has not started is prefetched by the worker, or still in the queue: not both, not neither.
    wait_until(lambda: len(staffed.ask("reserved")) + staffed.waiting() == 1, WAIT)
    for key in keys:
        staffed.witness.release(key)
    for result in results:
        result.get(timeout=WAIT)


def test_rate_limit(staffed: Workplace) -> None:
    assert "ok" in str(staffed.order("rate_limit", "add", "1000/m"))
    assert staffed.send("add", 1, 1).get(timeout=WAIT) == 2
    staffed.order("rate_limit", "add", None)


def test_a_rate_limited_task_waits(staffed: Workplace) -> None:
    staffed.order("rate_limit", "tell", "4/s")
    subject = uuid4().hex
    results = [staffed.send("tell", subject) for _ in range(3)]
    # A limited task does not hold up others.
    assert staffed.send("add", 1, 1).get(timeout=WAIT) == 2
    for result in results:
        result.get(timeout=WAIT)
    assert len(staffed.witness.told(subject)) == 3
    staffed.order("rate_limit", "tell", None)


def test_add_and_cancel_consumer(staffed: Workplace) -> None:
    queue, subject = f"{staffed.queue}-extra", uuid4().hex
    staffed.order("add_consumer", queue)
    staffed.send("tell", subject, "first", queue=queue)
    assert staffed.witness.wait(subject) == "first"
    staffed.order("cancel_consumer", queue)
    wait_until(lambda: [row["name"] for row in staffed.ask("active_queues")] == [staffed.queue], WAIT)
    staffed.send("tell", subject, "second", queue=queue)
    assert staffed.send("add", 1, 1).get(timeout=WAIT) == 2
    assert staffed.witness.told(subject) == []
    # The message waits for whoever consumes next.
    staffed.order("add_consumer", queue)
    assert staffed.witness.wait(subject) == "second"
    staffed.order("cancel_consumer", queue)


def test_events(staffed: Workplace) -> None:
    wanted = {"task-received", "task-started", "task-succeeded"}
    seen: dict[str, set[str]] = {}
    heard = threading.Event()

    def publish() -> None:
        # An event goes to who has subscribed by then: publish until one task was heard of from first to last.
        while not heard.wait(0.2):
            staffed.send("add", 1, 1)

    def on_event(event: dict[str, Any]) -> None:
        types = seen.setdefault(event.get("uuid", ""), set())
        types.add(event["type"])
        if wanted <= types:
            heard.set()
            receiver.should_stop = True

    publisher = threading.Thread(target=publish)
    with staffed.app.connection_for_read() as connection:
        receiver = staffed.app.events.Receiver(connection, handlers={"*": on_event})
        publisher.start()
        try:
            receiver.capture(limit=None, timeout=WAIT, wakeup=False)
        finally:
            heard.set()
            publisher.join()
    assert any(wanted <= types for types in seen.values()), seen


def test_the_purge_command(staffed: Workplace) -> None:
    queue = f"{staffed.queue}-purged"
    for number in range(4):
        staffed.send("add", number, 1, queue=queue)
    told = staffed.command("purge", "-f", "-Q", queue)
    assert "Purged 4 messages" in told


def test_the_amqp_command(staffed: Workplace) -> None:
    told = staffed.command("amqp", "queue.declare", f"{staffed.queue}-amqp")
    assert f"{staffed.queue}-amqp" in told


def test_the_inspect_command(staffed: Workplace) -> None:
    worker = staffed.shared_worker
    assert worker is not None
    # Who names the workers asked does not wait when all have answered.
    assert "pong" in staffed.command("inspect", "ping", "-t", "20", "-d", worker.name)
