"""A task that raises ``Throttled`` on real workers."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import pytest
from celery.result import AsyncResult

from celery_dq import AnyOf
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.broker.proxy import Proxy
from tests.broker.worker_app import BROKER_DB, OpenApp, WorkerApp

POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]
#: Seconds of a pause that does not end while a test runs.
LONG_S = 3600


def dq_of(worker_app: WorkerApp) -> Any:
    app: Any = worker_app.app
    return app.dq


def paused(worker_app: WorkerApp) -> Any:
    return dq_of(worker_app).quotas.paused(worker_app.queue)


def wait_for_pause(worker_app: WorkerApp, tenant: str) -> Any:
    wait_until(lambda: tenant in paused(worker_app), 30, what=lambda: f"{tenant} is paused")
    return paused(worker_app)[tenant]


def asked(worker_app: WorkerApp, key: str) -> list[tuple[float, int, bool]]:
    """Return the time, the counted retries, and whether it was redelivered, of each attempt of a task."""
    reports = (each.split() for each in worker_app.witness.reports(f"asked {key}"))
    return [(float(at), int(retries), redelivered == "True") for at, retries, redelivered in reports]


@pytest.mark.parametrize("task", ["ask", "ask_late", "ask_again"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_throttled_task_runs_again_before_the_later_ones(
    worker_app: WorkerApp, pool: str, task: str
) -> None:
    dq_of(worker_app).quotas.set(worker_app.queue, "a", concurrency=1)
    results = [worker_app.send(task, f"k{number}", 0.3, 2 - 2 * number, tenant="a") for number in range(2)]
    with worker_app.worker(pool, 1 if pool == "solo" else 2):
        assert worker_app.ran(2, subject="served") == ["k0", "k1"]
        worker_app.settled()
    first, second, third = asked(worker_app, "k0")
    assert first[1:] == second[1:] == third[1:] == (0, False)
    assert min(second[0] - first[0], third[0] - second[0]) >= 0.3
    assert [each.get(timeout=10) for each in results] == ["k0", "k1"]
    assert worker_app.witness.reports("retried") == ["None"] * 2
    assert worker_app.witness.reports("failed") == []
    assert paused(worker_app) == {}


@pytest.mark.parametrize("task", ["ask", "ask_late"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_throttled_task_waits_in_the_broker(worker_app: WorkerApp, pool: str, task: str) -> None:
    result: AsyncResult[str] = worker_app.send(task, "k", LONG_S, tenant="a")
    with worker_app.worker(pool) as worker:
        pause = wait_for_pause(worker_app, "a")
        wait_until(lambda: result.state == "RETRY", 30)
        worker_app.send("note", "of another tenant", tenant="b")
        worker_app.ran(1)
        worker.stop(signal.SIGKILL)
    assert (pause.cause.reason, pause.cause.task, pause.cause.task_id) == ("429 for k", task, result.id)
    assert timedelta(seconds=LONG_S - 60) < pause.until - pause.since <= timedelta(seconds=LONG_S)
    (message,) = dq_of(worker_app).queues[worker_app.queue].peek()
    assert (message.id, message.state, message.deliveries) == (result.id, "waiting", 0)
    with worker_app.worker(pool):
        worker_app.send("note", "of another tenant again", tenant="b")
        worker_app.ran(2)
        assert len(asked(worker_app, "k")) == 1
        dq_of(worker_app).quotas.resume(worker_app.queue, "a")
        assert worker_app.ran(1, subject="served") == ["k"]
        worker_app.settled()


def paused_partitions(worker_app: WorkerApp, tenant: str) -> list[int]:
    """Return the partitions in which the tenant is paused."""
    with dq_of(worker_app)._broker.open(worker_app.queue) as (partitions, client):
        return [each.keys.partition for each in partitions if client.zscore(each.keys.pauses, tenant)]


@pytest.fixture
def wide(open_app: OpenApp) -> WorkerApp:
    """An app whose queue has four partitions, in three of which the tenant ``a`` lives."""
    worker_app = open_app(dq_queues={"wide": {"partitions": 4}}, task_default_queue="wide")
    worker_app.queue = "wide"
    worker_app.keys = PartitionKeys("online", "wide")
    dq_of(worker_app).quotas.set("wide", "a", spread=3)
    return worker_app


@pytest.mark.parametrize("task", ["ask", "ask_late"])
def test_a_spread_tenant_is_paused_in_all_of_its_partitions(wide: WorkerApp, task: str) -> None:
    wide.send(task, "k", LONG_S, tenant="a")
    with wide.worker("prefork", 2):
        wait_until(lambda: len(paused_partitions(wide, "a")) == 3, 30)
        for number in range(6):
            wide.send("note", number, tenant="a")
        wide.send("note", "b", tenant="b")
        assert wide.ran(1) == ["b"]
        assert paused(wide)["a"].cause.task == task
        dq_of(wide).quotas.resume("wide", "a")
        assert wide.ran(1, subject="served") == ["k"]
        wide.ran(7)
    assert len(asked(wide, "k")) == 2


def test_a_named_tenant_is_paused_where_it_lives_and_the_task_waits_alone(wide: WorkerApp) -> None:
    result = wide.send("ask", "k", LONG_S, 1, "c", tenant="b")
    with wide.worker("threads", 2):
        pause = wait_for_pause(wide, "c")
        queue = dq_of(wide).queues["wide"]
        wait_until(lambda: queue.find(result.id).state == "delayed", 30)
        message = queue.find(result.id)
        assert abs(message.due - pause.until) < timedelta(seconds=30)
        wide.send("note", "c", tenant="c")
        wide.send("note", "b", tenant="b")
        assert wide.ran(1) == ["b"]
        assert list(paused(wide)) == ["c"]


def test_a_set_of_resources_goes_on_with_the_others(worker_app: WorkerApp) -> None:
    worker_app.send("ask", "k", LONG_S, tenant=AnyOf("gpu-1", "gpu-2"))
    with worker_app.worker("threads", 1):
        assert worker_app.ran(1, subject="served") == ["k"]
        worker_app.settled()
    ((resource, pause),) = paused(worker_app).items()
    assert resource in ("gpu-1", "gpu-2")
    assert pause.cause.reason == "429 for k"


@pytest.mark.parametrize("task", ["ask", "ask_late"])
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_lost_connection_loses_no_throttled_task(
    open_app: OpenApp, proxy: Proxy, lost: str, task: str
) -> None:
    worker_app = open_app(port=proxy.port, dq_lease=5.0)
    script = load_scripts()["requeue_and_pause"].sha1.encode()
    if lost == "request":
        proxy.cut_requests, proxy.cuts_left = script, 1
    else:
        proxy.drop_answers_to, proxy.drops_left = script, 1
    worker_app.send(task, "k", 0.3, tenant="a")
    with worker_app.worker("prefork", 1):
        assert worker_app.ran(1, subject="served") == ["k"]
        worker_app.settled()
    assert proxy.cut + proxy.dropped == 1
    assert len(asked(worker_app, "k")) == 2


def test_the_pause_of_a_person_stays(worker_app: WorkerApp) -> None:
    quotas = dq_of(worker_app).quotas
    worker_app.send("hold_then_ask", "k", LONG_S, tenant="a")
    with worker_app.worker("threads", 1):
        worker_app.ran(1, subject="began")
        quotas.pause(worker_app.queue, "a")
        by_a_person = paused(worker_app)
        worker_app.witness.release("k")
        queue = dq_of(worker_app).queues[worker_app.queue]
        wait_until(lambda: queue.snapshot().waiting, 30)
        assert paused(worker_app) == by_a_person
        assert by_a_person["a"].cause is None


def test_messages_with_a_dedup_key_stay_behind_a_throttled_one(worker_app: WorkerApp) -> None:
    options: dict[str, Any] = {"tenant": "a", "dedup": {"key": "key"}}
    first = worker_app.send("ask", "k0", LONG_S, **options)
    with worker_app.worker("prefork", 1):
        wait_for_pause(worker_app, "a")
        second = worker_app.send("ask", "k1", LONG_S, **options)
        assert second.id == first.id or second.verdict.name != "ACCEPT"
        dq_of(worker_app).quotas.resume(worker_app.queue, "a")
        assert worker_app.ran(1, subject="served") == ["k0"]
        worker_app.settled()


def test_a_worker_logs_why_a_tenant_is_paused(worker_app: WorkerApp) -> None:
    result = worker_app.send("ask", "k", LONG_S, tenant="a")
    with worker_app.worker("threads", 1) as worker:
        wait_for_pause(worker_app, "a")
        worker.wait_for_log(
            f"Tenant 'a' of queue {worker_app.queue} is to pause for 3600 s, because task ask[{result.id}] "
            "was throttled (429 for k). The task was requeued"
        )


def test_a_worker_logs_that_no_tenant_is_paused(worker_app: WorkerApp) -> None:
    result = worker_app.send("ask", "k", 0, tenant="a")
    with worker_app.worker("threads", 1) as worker:
        assert worker_app.ran(1, subject="served") == ["k"]
        worker.wait_for_log(
            f"Task ask[{result.id}] was throttled (429 for k) until a time that is over. No tenant is paused."
        )


@pytest.mark.parametrize("task", ["ask", "ask_late"])
def test_a_task_that_was_throttled_on_another_broker_is_sent_again(
    open_app: OpenApp, redis_server: RedisServer, task: str
) -> None:
    worker_app = open_app(broker_url=redis_server.url(BROKER_DB))
    result = worker_app.send(task, "k", 0.3, 2)
    with worker_app.worker("prefork", 1):
        assert result.get(timeout=30) == "k"
    first, second, third = asked(worker_app, "k")
    assert [each[1:] for each in (first, second, third)] == [(0, False)] * 3
    assert min(second[0] - first[0], third[0] - second[0]) >= 0.29
