"""Warm, soft and cold shutdown: running tasks finish or are requeued, waiting ones are released."""

from __future__ import annotations

import signal
from typing import Any
from uuid import uuid4

import celery
import pytest
import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import ACTIVE
from tests.conformance.celery_app import CeleryApp
from tests.conformance.shop import BROKER_DB
from tests.conformance.shutdown_probe import RECEIVES, SLEEPS, WAITS

WAIT = 30


def held(celery_app: CeleryApp, *keys: str, task: str = "hold_late") -> list[Any]:
    """Start tasks that wait for their release, and are acknowledged late; return their results."""
    results = [celery_app.send(task, key) for key in keys]
    for key in keys:
        celery_app.witness.wait(f"started:{key}")
    # The tasks report their start before their worker knows it. Celery forgets a job whose start it does
    # not know at a warm stop, and waits for it at a cold one.
    ids = {result.id for result in results}
    wait_until(
        lambda: ids <= {row["id"] for row in celery_app.ask("active")}, WAIT, what="tasks known to run"
    )
    return results


@pytest.mark.parametrize("pool", ["solo", "threads", "prefork", "gevent"])
def test_warm_shutdown_finishes_running_tasks_and_releases_the_rest(celery_app: CeleryApp, pool: str) -> None:
    key, later = uuid4().hex, uuid4().hex
    # Given a worker of one slot that runs one task and may have fetched more
    with celery_app.worker(pool, concurrency=1, conf={"worker_prefetch_multiplier": 4}) as worker:
        if pool == "solo":
            # A solo worker answers no command while it works, but knows its running task.
            running = celery_app.send("hold_late", key)
            celery_app.witness.wait(f"started:{key}")
        else:
            (running,) = held(celery_app, key)
        waiting = [celery_app.send("hold_late", later) for _ in range(3)]
        # When it is asked to stop
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
        celery_app.witness.release(key)
        if not celery_app.broker.expected(f"a warm shutdown starts nothing ({pool})", True):
            celery_app.witness.release(later, len(waiting))
        assert worker.wait(WAIT) == 0
    # Then the running task has finished, and each of the others is in the queue again, or has finished too.
    assert running.get(timeout=WAIT) == key
    finished = len(celery_app.witness.reports(f"finished:{later}"))
    if celery_app.broker.expected(f"a warm shutdown starts nothing ({pool})", True):
        assert finished == 0
    assert len(celery_app.witness.reports(f"started:{later}")) == finished
    wait_until(
        lambda: celery_app.waiting() + finished == len(waiting), WAIT, what=lambda: str(celery_app.waiting())
    )


# Only on dq: with the stock transport Celery sleeps half a second for each process without a result.
@pytest.mark.parametrize("broker", ["dq"], indirect=True)
def test_a_warm_shutdown_learns_the_last_results_and_does_not_sleep(celery_app: CeleryApp) -> None:
    keys = [uuid4().hex for _ in range(3)]
    # Given a worker with an idle process, and tasks that still run when it waits for their results only
    with celery_app.worker("prefork", concurrency=4, module="tests.conformance.shutdown_probe") as worker:
        results = held(celery_app, *keys)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        celery_app.witness.wait(WAITS)
        # When one after the other ends, then the worker receives each end while the others run
        for key in keys:
            celery_app.witness.release(key)
            celery_app.witness.wait(RECEIVES)
        assert worker.wait(WAIT) == 0
    assert [result.get(timeout=WAIT) for result in results] == keys
    assert celery_app.witness.reports(SLEEPS) == []


# In the threads pool Celery delays all acknowledgements until the last task has ended.
@pytest.mark.parametrize("broker", ["dq"], indirect=True)
@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_a_task_that_ends_during_a_warm_shutdown_is_acked_while_others_run(
    celery_app: CeleryApp, redis_server: RedisServer, task: str
) -> None:
    quick, slow = uuid4().hex, uuid4().hex
    # The lease is so long that no heartbeat reports the end in between
    with celery_app.worker("prefork", concurrency=2, conf={"dq_lease": 300}) as worker:
        results = held(celery_app, quick, slow, task=task)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
        celery_app.witness.release(quick)
        with redis.Redis(port=redis_server.port, db=BROKER_DB) as client:
            messages = PartitionKeys("online", celery_app.queue).messages
            wait_until(lambda: client.hlen(messages) == 1, WAIT, what="the end of one")
        celery_app.witness.release(slow)
        assert worker.wait(WAIT) == 0
    assert [result.get(timeout=WAIT) for result in results] == [quick, slow]


# An exception of Celery's signal handler is raised in the hub of gevent.
@pytest.mark.logged_error("BlockingSwitchOutError")
@pytest.mark.parametrize("broker", ["zookeeper"], indirect=True)
def test_cold_shutdown_releases_tasks_of_a_green_pool(celery_app: CeleryApp) -> None:
    key = uuid4().hex
    with celery_app.worker("gevent", concurrency=2) as worker:
        held(celery_app, key)
        worker.stop(signal.SIGQUIT)
    # The result of a killed greenlet is that of a success, after which Celery acknowledges.
    assert celery_app.witness.reports(f"finished:{key}") == []
    assert celery_app.waiting() == 1


def test_soft_shutdown_waits_for_tasks_that_can_finish(celery_app: CeleryApp) -> None:
    quick, slow = uuid4().hex, uuid4().hex
    conf = {"worker_soft_shutdown_timeout": 3.0}
    with celery_app.worker("prefork", concurrency=2, conf=conf) as worker:
        finishes, _ = held(celery_app, quick, slow)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGQUIT)
        worker.wait_for_log("Initiating Soft Shutdown")
        celery_app.witness.release(quick)
        worker.wait(WAIT)
    assert finishes.get(timeout=WAIT) == quick
    assert celery_app.witness.reports(f"finished:{slow}") == []
    assert celery_app.waiting() == 1


def test_cold_shutdown_releases_running_tasks(celery_app: CeleryApp) -> None:
    key = uuid4().hex
    with celery_app.worker("prefork", concurrency=1) as worker:
        (result,) = held(celery_app, key)
        worker.stop(signal.SIGQUIT)
    assert celery_app.witness.reports(f"finished:{key}") == []
    assert celery_app.waiting() == 1
    with celery_app.worker("solo", name="w2"):
        celery_app.witness.wait(f"started:{key}")
        celery_app.witness.release(key)
        assert result.get(timeout=WAIT) == key


def test_shutdown_by_remote_control(celery_app: CeleryApp) -> None:
    with celery_app.worker("prefork", concurrency=1) as worker:
        celery_app.ask("ping")
        celery_app.app.control.shutdown(destination=[worker.name])
        assert worker.process is not None
        assert worker.wait(WAIT) == 0


def test_delayed_tasks_survive_a_shutdown(celery_app: CeleryApp) -> None:
    subject = uuid4().hex
    with celery_app.worker("solo"):
        celery_app.send("report", subject, countdown=1)
        # The worker fetches the delayed message, if at all, before this one.
        assert celery_app.send("add", 1, 1).get(timeout=WAIT) == 2
    with celery_app.worker("solo", name="w2"):
        celery_app.witness.wait(subject)


# Celery has the setting since 5.6. Without it dq-redis leaves these messages in the broker, too, because it
# claims ahead only what a measured service time allows.
@pytest.mark.parametrize("broker", ACTIVE if celery.VERSION >= (5, 6) else ("dq",), indirect=True)
def test_disable_prefetch_fetches_only_running_tasks(celery_app: CeleryApp) -> None:
    keys = [uuid4().hex for _ in range(2)]
    conf = {"worker_prefetch_multiplier": 10, "worker_disable_prefetch": True}
    with celery_app.worker("prefork", concurrency=2, conf=conf):
        results = held(celery_app, *keys)
        results += [celery_app.send("add", number, 1) for number in range(4)]
        assert celery_app.ask("reserved") == []
        assert celery_app.waiting() == 4
        for key in keys:
            celery_app.witness.release(key)
        assert [result.get(timeout=WAIT) for result in results] == [*keys, 1, 2, 3, 4]
