"""Messages that a running task publishes while Redis is away, or refuses them, are sent afterwards."""

from __future__ import annotations

import time

import pytest
from celery import chain, chord

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.worker_app import OpenApp, WorkerApp

LEASE_S = 1.0
#: Seconds after which a call outside of a task fails.
TIMEOUT_S = 1.0


@pytest.fixture
def split_worker_app(open_app: OpenApp, server: RedisServer) -> WorkerApp:
    """An app whose broker may be stopped, while results and the witness stay."""
    options = {"dq_lease": LEASE_S, "dq_publish_timeout": TIMEOUT_S, "task_reject_on_worker_lost": False}
    return open_app(port=server.port, **options)


def hold_tasks_that_publish(worker_app: WorkerApp) -> set[str]:
    """Begin nine tasks that will publish in each way, and return the keys on which they wait."""
    note = worker_app.app.signature("note")
    for ending in ("", "_late"):
        hold = worker_app.app.signature(f"hold{ending}")
        chain(hold.clone((f"chain{ending}",)), note).apply_async()
        hold.clone((f"link{ending}",)).apply_async(link=note)
        worker_app.send(f"hold_then_retry{ending}", f"retry{ending}")
        worker_app.send(f"hold_then_call{ending}", f"call{ending}")
    chord([worker_app.app.signature("hold", ("chord",))], app=worker_app.app)(note)
    return set(worker_app.ran(9, subject="began"))


def wait_longer_than(seconds: float) -> None:
    """Wait for a time that is longer than each timeout of the test."""
    over = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > over, 30)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_retries_and_callbacks_wait_for_the_broker(
    split_worker_app: WorkerApp, server: RedisServer, pool: str
) -> None:
    worker_app = split_worker_app
    with worker_app.worker(pool, 9) as worker:
        keys = hold_tasks_that_publish(worker_app)
        server.kill()
        for key in keys:
            worker_app.witness.release(key)
        worker.wait_for_log("waits for the broker", 30)
        wait_longer_than(2 * TIMEOUT_S + LEASE_S)
        server.start()
        reported = worker_app.ran(9, 60)
    assert sorted(reported) == sorted(keys - {"chord"} | {"['chord']"})


@pytest.mark.parametrize(
    ("pool", "setting"), [("prefork", ("maxmemory", "1")), ("threads", ("min-replicas-to-write", "1"))]
)
def test_retries_and_callbacks_wait_for_a_broker_that_refuses_them(
    split_worker_app: WorkerApp, server: RedisServer, pool: str, setting: tuple[str, str]
) -> None:
    worker_app = split_worker_app
    with worker_app.worker(pool, 9) as worker:
        keys = hold_tasks_that_publish(worker_app)
        server.ask("CONFIG", "SET", *setting)
        for key in keys:
            worker_app.witness.release(key)
        worker.wait_for_log("waits for the broker", 30, occurrences=9)
        wait_longer_than(1.5 * TIMEOUT_S)
        server.ask("CONFIG", "SET", setting[0], "0")
        reported = worker_app.ran(9, 60)
    assert sorted(reported) == sorted(keys - {"chord"} | {"['chord']"})


def test_the_attempts_of_a_task_do_not_stay_with_its_connection(split_worker_app: WorkerApp) -> None:
    with split_worker_app.worker("threads", 1):
        split_worker_app.send("call_on_own_connection", "sent")
        assert split_worker_app.ran(1) == ["sent"]
        before, after = split_worker_app.ran(2, subject="max_retries")
    assert before == after
