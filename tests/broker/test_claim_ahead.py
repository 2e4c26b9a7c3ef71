"""Messages claimed ahead: their number follows the service time, and not the prefetch count of Celery."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import celery
import pytest

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.broker.worker_app import OpenApp, WorkerApp

#: So long a time may be claimed ahead that the speed of the machine does not matter.
FAR: dict[str, Any] = {"dq_lease": 240.0, "dq_claim_ahead": 10.0}


@contextmanager
def counting(worker_app: WorkerApp, script: str) -> Iterator[list[str]]:
    """Collect the calls of this script until the end of the block."""
    beginning = f"EVALSHA {load_scripts()[script].sha1}"
    calls: list[str] = []
    with worker_app.client.monitor() as monitor:

        def read() -> None:
            for command in monitor.listen():
                if "end-of-count" in command["command"]:
                    return
                if command["command"].startswith(beginning):
                    calls.append(command["command"])

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield calls
        finally:
            worker_app.witness.report("end-of-count", 1)
            thread.join()


def in_flight_count(worker_app: WorkerApp) -> int:
    keys = worker_app.client.scan_iter(worker_app.keys.prefix + "held:*")
    return sum(worker_app.client.hlen(key) for key in keys)


def learn(worker_app: WorkerApp, count: int = 40) -> None:
    """Let the worker measure that its tasks are short."""
    for _ in range(count):
        worker_app.send("note", "short")
    worker_app.ran(count)


def stop_behind(worker_app: WorkerApp, key: str) -> None:
    """Occupy the only slot until the witness releases `key`."""
    worker_app.send("hold", key)
    worker_app.ran(1, subject="began")


@pytest.mark.parametrize(
    ("pool", "multiplier"), [("solo", 4), ("threads", 1), ("prefork", 4), ("prefork", 1)]
)
def test_short_tasks_share_a_claim_with_many_others(open_app: OpenApp, pool: str, multiplier: int) -> None:
    worker_app = open_app(**FAR, worker_prefetch_multiplier=multiplier)
    for _ in range(400):
        worker_app.send("note", "short")
    with counting(worker_app, "claim") as claims, worker_app.worker(pool, 1 if pool == "solo" else 2):
        worker_app.ran(400)
        worker_app.settled()
    assert len(claims) <= 40


@pytest.mark.parametrize("multiplier", [4, 1])
def test_messages_claimed_ahead_are_not_reserved_and_return_at_a_warm_shutdown(
    open_app: OpenApp, multiplier: int
) -> None:
    worker_app = open_app(**FAR, worker_prefetch_multiplier=multiplier)
    with worker_app.worker("threads", 1, warm=True) as worker:
        learn(worker_app)
        stop_behind(worker_app, "a")
        for n in range(30):
            worker_app.send("note", f"later {n}")
        wait_until(lambda: in_flight_count(worker_app) > 2 * multiplier, 30)
        worker_app.wait_responsive()
        reserved = worker_app.app.control.inspect(timeout=30, limit=1).reserved() or {}
        assert [len(each) for each in reserved.values()] == [multiplier]
        os.kill(worker.pid, signal.SIGTERM)
        # The inbox returns at once, and the messages that Celery has reserved when its pool stops.
        wait_until(lambda: in_flight_count(worker_app) == 1 + multiplier, 30)
        worker_app.witness.release("a")
        worker.wait()
    with worker_app.worker("threads", 1):
        ran = worker_app.ran(70)
        worker_app.settled()
    assert ran[40:] == [f"later {n}" for n in range(30)]


#: Settings and a quota with which nothing is claimed ahead.
NOTHING_AHEAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no-claim-ahead": ({"dq_claim_ahead": 0}, {}),
    "concurrency": ({}, {"concurrency": 5}),
}
if celery.VERSION >= (5, 6):  # older releases do not know the setting
    NOTHING_AHEAD["disable-prefetch"] = ({"worker_disable_prefetch": True}, {})


@pytest.mark.parametrize(("conf", "quota"), NOTHING_AHEAD.values(), ids=NOTHING_AHEAD)
def test_nothing_is_claimed_ahead(open_app: OpenApp, conf: dict[str, Any], quota: dict[str, Any]) -> None:
    worker_app = open_app(**{**FAR, **conf})
    if quota:
        app: Any = worker_app.app
        app.dq.quotas.set(worker_app.queue, "", **quota)
    with worker_app.worker("threads", 1):
        learn(worker_app)
        stop_behind(worker_app, "a")
        worker_app.send("hold", "b")
        for n in range(30):
            worker_app.send("note", f"later {n}")
        worker_app.witness.release("a")
        worker_app.ran(2, subject="began")
        wait_until(lambda: in_flight_count(worker_app) == 1, 30)
        with worker_app.worker("threads", 1):
            # The second worker gets all of them.
            assert worker_app.ran(70)[40:] == [f"later {n}" for n in range(30)]
        worker_app.witness.release("b")


def rate_limit(worker_app: WorkerApp) -> None:
    worker_app.wait_responsive()
    replies = worker_app.app.control.rate_limit("note", "1/h", reply=True, timeout=30, limit=1)
    assert replies


@pytest.mark.parametrize(
    "obstacle", [partial(stop_behind, key="a"), rate_limit], ids=["long task", "rate limit"]
)
def test_messages_claimed_ahead_do_not_wait_for_a_worker_that_starts_none(
    open_app: OpenApp, obstacle: Callable[[WorkerApp], None]
) -> None:
    # No heartbeat comes during this test.
    worker_app = open_app(dq_lease=240.0, dq_claim_ahead=0.5, worker_prefetch_multiplier=1)
    with worker_app.worker("threads", 1):
        learn(worker_app)
        obstacle(worker_app)
        for n in range(30):
            worker_app.send("note", f"later {n}")
        wait_until(lambda: in_flight_count(worker_app) > 5, 30)
        with worker_app.worker("threads", 1):
            # Celery itself has reserved one or two messages in the first worker.
            assert len(worker_app.ran(68)) >= 68
        worker_app.witness.release("a")


def test_a_solo_worker_keeps_no_messages_behind_a_long_task(open_app: OpenApp) -> None:
    worker_app = open_app(dq_lease=4.0, dq_claim_ahead=2.0)
    with worker_app.worker("solo", 1):
        learn(worker_app)
        stop_behind(worker_app, "first")
        worker_app.send("hold", "long")
        for n in range(30):
            worker_app.send("note", f"later {n}")
        worker_app.witness.release("first")
        worker_app.ran(2, subject="began")
        with worker_app.worker("threads", 1):
            worker_app.ran(70)
        worker_app.witness.release("long")
        worker_app.settled()


def test_brief_tasks_of_a_solo_worker_hand_no_next_look_over(open_app: OpenApp) -> None:
    worker_app = open_app(**FAR)
    queues = [f"{worker_app.queue}-{number}" for number in range(9)]
    app: Any = worker_app.app
    for name in queues:
        app.dq.quotas.set(name, "", rate=5)
        for _ in range(20):
            worker_app.send("note", name, queue=name)
    with worker_app.worker("solo", 1, queues=queues):
        worker_app.ran(20)  # the length of the first tasks was not known before
        with counting(worker_app, "hand_over_wakeup") as handovers:
            worker_app.ran(120)
        assert not handovers


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_tenant_with_a_concurrency_has_its_turn_beside_messages_claimed_ahead(
    open_app: OpenApp, partitions: int
) -> None:
    worker_app = open_app(dq_lease=240.0)
    app: Any = worker_app.app
    app.dq.queues[worker_app.queue].set_partitions(partitions)
    app.dq.quotas.set(worker_app.queue, "limited", concurrency=4)
    for _ in range(600):
        worker_app.send("note", "busy", tenant="busy")
    for _ in range(20):
        worker_app.send("note", "limited", tenant="limited")
    with worker_app.worker("threads", 2):
        order = worker_app.ran(620)
        worker_app.settled()
    assert "limited" not in order[300:]
