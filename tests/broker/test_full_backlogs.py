"""Workers and the calls of their tasks while a tenant has as many messages waiting as it may."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import celery
import pytest
from celery import chain, chord, group
from celery.result import AsyncResult

from celery_dq import QueueFull
from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from tests.broker.worker_app import OpenApp, WorkerApp


def dq_of(worker_app: WorkerApp) -> Any:
    app: Any = worker_app.app
    return app.dq


def bound(worker_app: WorkerApp, count: int | None, how: str = "refuse", tenant: str = "a") -> None:
    dq_of(worker_app).quotas.set(worker_app.queue, tenant, max_waiting=count, when_full=how)


def waiting(worker_app: WorkerApp, tenant: str = "a") -> int:
    return int(dq_of(worker_app).queues[worker_app.queue].tenant(tenant).waiting)


def fill(worker_app: WorkerApp, count: int = 1) -> list[str]:
    """Fill the backlog of tenant a while it is paused, and return what its messages will report."""
    dq_of(worker_app).quotas.pause(worker_app.queue, "a")
    for number in range(count):
        worker_app.send("note", f"filler {number}", tenant="a")
    wait_until(lambda: waiting(worker_app) == count, 30)
    return [f"filler {number}" for number in range(count)]


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_a_call_that_waits_goes_on_when_a_worker_takes_a_message(open_app: OpenApp, pool: str) -> None:
    worker_app = open_app(dq_publish_timeout=90)  # a worker starts in two thirds of that
    bound(worker_app, 2, "wait")
    for number in range(2):
        worker_app.send("note", number, tenant="a")
    with ThreadPoolExecutor(1) as threads:
        calls = [threads.submit(worker_app.send, "note", number, tenant="a") for number in range(2, 8)]
        wait_until(lambda: counters(worker_app).full > 0, 30)
        with worker_app.worker(pool, 1):
            for call in calls:
                call.result(30)
            assert worker_app.ran(8) == [str(number) for number in range(8)]


def counters(worker_app: WorkerApp) -> Any:
    return dq_of(worker_app).queues[worker_app.queue].snapshot().counters


@pytest.mark.parametrize(
    ("pool", "task"),
    [
        ("prefork", "hold_then_retry"),
        ("prefork", "hold_then_retry_late"),
        ("threads", "hold_then_retry"),
        ("solo", "outcome"),
        ("gevent", "hold_then_retry_late"),
    ],
)
def test_a_retry_is_never_refused(worker_app: WorkerApp, pool: str, task: str) -> None:
    bound(worker_app, 1)
    result = worker_app.send(task, "retry", tenant="a")
    with worker_app.worker(pool, 1):
        worker_app.ran(1, subject="began")
        fillers = fill(worker_app)
        with pytest.raises(QueueFull):
            worker_app.send("note", "refused", tenant="a")
        worker_app.witness.release("retry")
        # The backlog is longer than its bound by the retry.
        wait_until(lambda: waiting(worker_app) == 2, 30)
        dq_of(worker_app).quotas.resume(worker_app.queue, "a")
        result.get(timeout=30)
        assert set(fillers) <= set(worker_app.ran(1 + (task != "outcome")))
        worker_app.settled()


@pytest.mark.logged_error("max_waiting allows no more")
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_task_gets_the_error_of_a_call_that_is_refused(open_app: OpenApp, pool: str) -> None:
    worker_app = open_app(dq_inherit_tenant=True)
    bound(worker_app, 1)
    result: AsyncResult[Any] = worker_app.send("hold_then_call", "call", tenant="a")
    with worker_app.worker(pool, 1):
        worker_app.ran(1, subject="began")
        fillers = fill(worker_app)
        worker_app.witness.release("call")
        with pytest.raises(QueueFull, match="max_waiting allows no more"):
            result.get(timeout=30)
        dq_of(worker_app).quotas.resume(worker_app.queue, "a")
        worker_app.send("note", "other", tenant="b")
        assert set(worker_app.ran(2)) == {*fillers, "other"}


@pytest.mark.parametrize(("pool", "how"), [("prefork", "refuse"), ("threads", "wait"), ("solo", "wait")])
def test_chains_links_and_chords_go_on_in_a_full_tenant(worker_app: WorkerApp, pool: str, how: str) -> None:
    app = worker_app.app
    note, hold = app.signature("note", tenant="a"), app.signature("hold", tenant="a")
    bound(worker_app, 5)
    chain(hold.clone(("chain",)), note).apply_async()
    hold.clone(("link",)).apply_async(link=note, tenant="a")
    chord([hold.clone(("chord",))], app=app)(note)
    keys = ["chain", "link", "chord"]
    expected = ["['chord']", "chain", "link"]
    if celery.VERSION >= (5, 7):
        chord([hold.clone(("to a chain",))], app=app)(chain(note, note))
        chord([hold.clone(("to a group",))], app=app)(group([note, note], app=app))
        keys += ["to a chain", "to a group"]
        expected += ["['to a chain']"] * 2 + ["['to a group']"] * 2
    bound(worker_app, 1, how)
    # The only slot of the worker may not wait for room, which only the worker makes.
    with worker_app.worker(pool, 1):
        for key in keys:
            worker_app.witness.release(key)
        assert sorted(worker_app.ran(len(expected))) == sorted(expected)
        worker_app.settled()


def test_a_group_into_a_full_tenant_raises_at_the_first_refused_call(worker_app: WorkerApp) -> None:
    bound(worker_app, 2)
    calls = [worker_app.app.signature("note", (number,), tenant="a") for number in range(4)]
    with pytest.raises(QueueFull):
        group(calls, app=worker_app.app).apply_async()
    assert waiting(worker_app) == 2


@pytest.mark.logged_error("max_waiting allows no more")
@pytest.mark.parametrize("kind", ["hold_then_group", "hold_then_chain", "hold_then_chord"])
def test_the_calls_of_the_code_of_a_task_are_no_continuation_of_it(worker_app: WorkerApp, kind: str) -> None:
    result: AsyncResult[Any] = worker_app.send(kind, "key", tenant="b")
    with worker_app.worker("threads", 1):
        worker_app.ran(1, subject="began")
        bound(worker_app, 1)
        fill(worker_app)
        worker_app.witness.release("key")
        with pytest.raises(QueueFull):
            result.get(timeout=30)
    assert waiting(worker_app) == 1


def states(worker_app: WorkerApp, results: list[AsyncResult[Any]]) -> list[str]:
    """Return the states of these calls now: a result keeps the first final state that it has read."""
    return [worker_app.app.AsyncResult(each.id).state for each in results]


@pytest.mark.parametrize(("how", "state"), [("discard", "REVOKED"), ("dead_letter", "FAILURE")])
def test_a_call_that_is_pushed_out_has_a_result(worker_app: WorkerApp, how: str, state: str) -> None:
    results: list[AsyncResult[Any]] = [worker_app.send("note", number, tenant="a") for number in range(3)]
    bound(worker_app, 2, how)
    results.append(worker_app.send("note", 3, tenant="a"))
    with worker_app.worker("threads", 1):
        assert worker_app.ran(2) == ["2", "3"]
        wait_until(lambda: [each.state for each in results[:2]] == [state] * 2, 30)
        assert (counters(worker_app).overflowed, counters(worker_app).full) == (2, 0)
        if how == "dead_letter":
            assert isinstance(results[0].result, QueueFull)
            bound(worker_app, 1, "refuse")
            letters = dq_of(worker_app).dead_letters[worker_app.queue]
            fillers = fill(worker_app)
            assert letters.replay() == 2
            assert waiting(worker_app) == 3
            dq_of(worker_app).quotas.resume(worker_app.queue, "a")
            assert set(worker_app.ran(5)) == {"0", "1", "2", "3", *fillers}
            wait_until(lambda: states(worker_app, results) == ["SUCCESS"] * 4, 30)


def test_a_delayed_message_comes_back_to_a_full_tenant(worker_app: WorkerApp) -> None:
    results = [worker_app.send("note", f"later {number}", tenant="a", countdown=2) for number in range(3)]
    with worker_app.worker("threads", 1):
        bound(worker_app, 1)
        fillers = fill(worker_app)
        wait_until(lambda: waiting(worker_app) == 4, 30)
        with pytest.raises(QueueFull):
            worker_app.send("note", "refused", tenant="a")
        dq_of(worker_app).quotas.resume(worker_app.queue, "a")
        assert len(worker_app.ran(4)) == 4
        for each in results:
            each.get(timeout=30)
    assert set(fillers) < set(worker_app.ran(4))


def test_messages_of_a_lost_worker_come_back_to_a_full_tenant(worker_app: WorkerApp) -> None:
    bound(worker_app, 1)
    worker_app.send("hold_late", "key", tenant="a")
    with worker_app.worker("threads", 1) as worker:
        worker_app.ran(1, subject="began")
        fillers = fill(worker_app)
        worker.stop()
    with worker_app.worker("threads", 1):
        wait_until(lambda: waiting(worker_app) == 2, 30)
        dq_of(worker_app).quotas.resume(worker_app.queue, "a")
        worker_app.witness.release("key")
        assert worker_app.ran(1) == fillers
        assert worker_app.ran(1, subject="ended") == ["key"]


def test_a_move_into_a_full_tenant_moves_all_messages(worker_app: WorkerApp) -> None:
    for number in range(5):
        worker_app.send("note", number, tenant="a", queue="other")
    bound(worker_app, 1)
    worker_app.send("note", 5, tenant="a")
    moved = dq_of(worker_app).queues["other"].move(to=worker_app.queue, tenant="a")
    assert (moved, waiting(worker_app)) == (5, 6)


def test_each_share_of_a_spread_tenant_has_its_part_of_the_bound(open_app: OpenApp) -> None:
    worker_app = open_app(dq_queues={"wide": {"partitions": 4}}, task_default_queue="wide")
    worker_app.queue, worker_app.keys = "wide", PartitionKeys("online", "wide")
    dq_of(worker_app).quotas.set("wide", "a", spread=3, max_waiting=10)
    bound(worker_app, 4, tenant="b")
    accepted: dict[str, list[int]] = {"a": [], "b": []}
    errors = {}
    for number in range(60):
        for tenant, numbers in accepted.items():
            try:
                worker_app.send("note", number, tenant=tenant)
                numbers.append(number)
            except QueueFull as error:
                errors[tenant] = str(error)
    assert [len(each) for each in accepted.values()] == [10, 4]
    assert "in a partition of queue 'wide', and its share of the max_waiting" in errors["a"]
    assert "4 messages of tenant 'b' wait in queue 'wide', and its max_waiting" in errors["b"]
    assert accepted["b"] == [0, 1, 2, 3]
    with worker_app.worker("threads", 2):
        assert len(worker_app.ran(14)) == 14
