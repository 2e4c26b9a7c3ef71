"""Warm, soft and cold shutdown: what runs is finished or given back, what waits goes back."""

from __future__ import annotations

import signal
from typing import Any
from uuid import uuid4

import pytest
import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.conformance.awake import HEARS, SLEEPS, WAITS
from tests.conformance.mailroom import on_redis
from tests.conformance.shop import BROKER_DB
from tests.conformance.workplace import Workplace

WAIT = 30


def held(workplace: Workplace, *keys: str, task: str = "hold_late") -> list[Any]:
    """The results of tasks that run and wait for their release, acknowledged late."""
    results = [workplace.send(task, key) for key in keys]
    for key in keys:
        workplace.witness.wait(f"started:{key}")
    # They say so themselves, before their worker hears of it. What Celery has not heard of it forgets at a
    # warm stop, and waits for at a cold one.
    ids = {result.id for result in results}
    wait_until(lambda: ids <= {row["id"] for row in workplace.ask("active")}, WAIT, what="tasks known to run")
    return results


@pytest.mark.parametrize("pool", ["solo", "threads", "prefork", "gevent"])
def test_warm_shutdown_finishes_what_runs_and_returns_the_rest(workplace: Workplace, pool: str) -> None:
    key, later = uuid4().hex, uuid4().hex
    # Given a worker of one slot that runs one task and may have fetched more
    with workplace.worker(pool, concurrency=1, conf={"worker_prefetch_multiplier": 4}) as worker:
        if pool == "solo":
            # It answers nobody while it works, and knows what it does.
            running = workplace.send("hold_late", key)
            workplace.witness.wait(f"started:{key}")
        else:
            (running,) = held(workplace, key)
        waiting = [workplace.send("hold_late", later) for _ in range(3)]
        # When it is asked to stop
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
        workplace.witness.release(key)
        if not workplace.broker.expected(f"a warm shutdown starts nothing ({pool})", True):
            workplace.witness.release(later, len(waiting))
        assert worker.wait(WAIT) == 0
    # Then what ran has finished, and each of the others is back in the queue, or was finished too.
    assert running.get(timeout=WAIT) == key
    finished = len(workplace.witness.told(f"finished:{later}"))
    if workplace.broker.expected(f"a warm shutdown starts nothing ({pool})", True):
        assert finished == 0
    assert len(workplace.witness.told(f"started:{later}")) == finished
    wait_until(
        lambda: workplace.waiting() + finished == len(waiting), WAIT, what=lambda: str(workplace.waiting())
    )


# Only there: with the stock transport Celery sleeps half a second for each process that has no result yet.
@pytest.mark.parametrize("broker", ["dq"], indirect=True)
def test_a_warm_shutdown_hears_the_last_results_and_does_not_sleep(workplace: Workplace) -> None:
    keys = [uuid4().hex for _ in range(3)]
    # Given a worker with an idle process, and tasks that still run when it waits for their results only
    with workplace.worker("prefork", concurrency=4, module="tests.conformance.awake") as worker:
        results = held(workplace, *keys)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        workplace.witness.wait(WAITS)
        # When one after the other ends, then it is heard while the others run
        for key in keys:
            workplace.witness.release(key)
            workplace.witness.wait(HEARS)
        assert worker.wait(WAIT) == 0
    assert [result.get(timeout=WAIT) for result in results] == keys
    assert workplace.witness.told(SLEEPS) == []


# In the threads pool Celery keeps all acknowledgements until the last task has ended.
@pytest.mark.parametrize("broker", ["dq"], indirect=True)
@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_what_ends_during_a_warm_shutdown_is_finished_while_others_run(
    workplace: Workplace, redis_server: RedisServer, task: str
) -> None:
    quick, slow = uuid4().hex, uuid4().hex
    # So long a lease that no heartbeat tells of it meanwhile
    with workplace.worker("prefork", concurrency=2, conf={"dq_lease": 300}) as worker:
        results = held(workplace, quick, slow, task=task)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
        workplace.witness.release(quick)
        with redis.Redis(port=redis_server.port, db=BROKER_DB) as client:
            messages = PartitionKeys("online", workplace.queue).messages
            wait_until(lambda: client.hlen(messages) == 1, WAIT, what="the end of one")
        workplace.witness.release(slow)
        assert worker.wait(WAIT) == 0
    assert [result.get(timeout=WAIT) for result in results] == [quick, slow]


def test_cold_shutdown_gives_back_what_runs(workplace: Workplace) -> None:
    key = uuid4().hex
    with workplace.worker("prefork", concurrency=1) as worker:
        held(workplace, key)
        worker.stop(signal.SIGQUIT)
    assert workplace.witness.told(f"finished:{key}") == []
    assert workplace.waiting() == 1


def test_soft_shutdown_waits_for_what_can_finish(workplace: Workplace) -> None:
    quick, slow = uuid4().hex, uuid4().hex
    conf = {"worker_soft_shutdown_timeout": 3.0}
    with workplace.worker("prefork", concurrency=2, conf=conf) as worker:
        finishes, _ = held(workplace, quick, slow)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGQUIT)
        worker.wait_for_log("Initiating Soft Shutdown")
        workplace.witness.release(quick)
        worker.wait(WAIT)
    assert finishes.get(timeout=WAIT) == quick
    assert workplace.witness.told(f"finished:{slow}") == []
    assert workplace.waiting() == 1


def test_the_next_worker_runs_what_was_given_back(workplace: Workplace) -> None:
    key = uuid4().hex
    with workplace.worker("prefork", concurrency=1) as worker:
        (result,) = held(workplace, key)
        worker.stop(signal.SIGQUIT)
    with workplace.worker("solo", name="w2"):
        workplace.witness.wait(f"started:{key}")
        workplace.witness.release(key)
        assert result.get(timeout=WAIT) == key


def test_shutdown_by_remote_control(workplace: Workplace) -> None:
    with workplace.worker("prefork", concurrency=1) as worker:
        workplace.ask("ping")
        workplace.app.control.shutdown(destination=[worker.name])
        assert worker.process is not None
        assert worker.wait(WAIT) == 0


def test_delayed_tasks_survive_a_shutdown(workplace: Workplace) -> None:
    subject = uuid4().hex
    with workplace.worker("solo"):
        workplace.send("tell", subject, countdown=1)
        # The delayed one is fetched, or not, before this one.
        assert workplace.send("add", 1, 1).get(timeout=WAIT) == 2
    with workplace.worker("solo", name="w2"):
        workplace.witness.wait(subject)


@on_redis
def test_disable_prefetch_fetches_only_what_runs(workplace: Workplace) -> None:
    keys = [uuid4().hex for _ in range(2)]
    conf = {"worker_prefetch_multiplier": 10, "worker_disable_prefetch": True}
    with workplace.worker("prefork", concurrency=2, conf=conf):
        results = held(workplace, *keys)
        results += [workplace.send("add", number, 1) for number in range(4)]
        assert workplace.ask("reserved") == []
        assert workplace.waiting() == 4
        for key in keys:
            workplace.witness.release(key)
        assert [result.get(timeout=WAIT) for result in results] == [*keys, 1, 2, 3, 4]
