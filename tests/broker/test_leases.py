"""In-flight messages of a worker: kept as long as it lives, released soon after it dies."""

from __future__ import annotations

import os
import signal

import pytest

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.broker.proxy import Proxy
from tests.broker.worker_app import OpenApp, WorkerApp

#: Longer than the usual pauses of a busy machine, so that a slow worker is not taken for dead.
LEASE_S = 2.0


@pytest.fixture
def worker_app(open_app: OpenApp) -> WorkerApp:
    return open_app(dq_lease=LEASE_S)


def first_lease_s(worker_app: WorkerApp) -> float:
    """Return the seconds until the first lease expires, by the server's clock."""
    ((_, ends_us),) = worker_app.client.zrange(worker_app.keys.leases, 0, 0, withscores=True)
    seconds, microseconds = worker_app.client.time()
    return float(ends_us / 1e6 - seconds - microseconds / 1e6)


@pytest.mark.parametrize(("pool", "task"), [("solo", "nap"), ("solo", "spin"), ("gevent", "spin")])
def test_a_long_task_keeps_its_message(worker_app: WorkerApp, pool: str, task: str) -> None:
    worker_app.send(task, 2.1 * LEASE_S)
    with worker_app.worker(pool, 1):
        worker_app.ran(1, subject="began")
        with worker_app.worker("threads", 1):
            worker_app.ran(1, subject="ended")
            worker_app.settled()
    assert worker_app.witness.reports("began") == [task]
    assert worker_app.dead() == {}


@pytest.mark.parametrize("pool", ["solo", "prefork", "threads", "gevent"])
def test_messages_of_a_killed_worker_return_in_order(worker_app: WorkerApp, pool: str) -> None:
    worker_app.send("hold_late", "first")
    for n in range(6):
        worker_app.send("note", n)
    with worker_app.worker(pool, 1) as victim:
        worker_app.ran(1, subject="began")
        for child in victim.children():
            child.kill()
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: not victim.alive)
    # Then the worker keeps its messages for no longer than its lease.
    assert first_lease_s(worker_app) <= LEASE_S
    worker_app.send("note", "younger")
    worker_app.send("hold", "gate", priority=9)
    with worker_app.worker("threads", 1):
        worker_app.ran(2, subject="began")
        wait_until(lambda: worker_app.client.zcard(worker_app.keys.leases) == 1, 30)
        worker_app.witness.release("gate")
        worker_app.witness.release("first", 2)
        reported = worker_app.ran(7)
        # A message that was in flight at the death is a suspect and goes alone. Its neighbour may pass it.
        assert sorted(reported[:2]) == ["0", "1"]
        assert reported[2:] == ["2", "3", "4", "5", "younger"]
        assert worker_app.witness.reports("began") == ["first", "gate", "first"]
        worker_app.settled()
    assert worker_app.dead() == {}


def test_a_paused_worker_starts_nothing_stale(worker_app: WorkerApp) -> None:
    """SIGSTOP for longer than the lease: another worker takes over, and the first one notices."""
    # One task runs, and others are in flight behind it.
    with worker_app.worker("threads", 1) as paused:
        for n in range(30):
            worker_app.send("note", f"warm-{n}")
        worker_app.ran(30)
        worker_app.send("hold_late", "first")
        worker_app.ran(1, subject="began")
        for n in range(5):
            worker_app.send("note", n)
        os.kill(paused.pid, signal.SIGSTOP)
        try:
            with worker_app.worker("threads", 1):
                worker_app.ran(2, subject="began")
                worker_app.witness.release("first", 2)  # the paused worker takes the first release
                worker_app.ran(35)
                os.kill(paused.pid, signal.SIGCONT)
                worker_app.ran(2, subject="ended")
                worker_app.send("note", "last")
                reported = worker_app.ran(36)
                assert sorted(reported[30:]) == sorted([str(n) for n in range(5)] + ["last"])
                worker_app.settled()
        finally:
            os.kill(paused.pid, signal.SIGCONT)
    assert worker_app.dead() == {}


def test_a_paused_solo_worker_starts_nothing_that_waits_behind_its_task(worker_app: WorkerApp) -> None:
    worker_app.conf["dq_claim_ahead"] = 1.0
    with worker_app.worker("solo", 1) as paused:
        for n in range(30):
            worker_app.send("note", f"warm-{n}")
        worker_app.ran(30)
        worker_app.send("hold", "gate")
        worker_app.ran(1, subject="began")
        # One claim brings the next task and others behind it.
        worker_app.send("hold_late", "first")
        for n in range(10):
            worker_app.send("note", n)
        worker_app.witness.release("gate")
        worker_app.ran(2, subject="began")
        held = worker_app.keys.prefix + "held:*"
        wait_until(lambda: sum(map(worker_app.client.hlen, worker_app.client.scan_iter(held))) > 1, 30)
        os.kill(paused.pid, signal.SIGSTOP)
        try:
            with worker_app.worker("threads", 1):
                worker_app.ran(3, subject="began")
                worker_app.witness.release("first", 2)  # the paused worker takes the first release
                worker_app.ran(40)
                os.kill(paused.pid, signal.SIGCONT)
                worker_app.ran(3, subject="ended")
                for n in range(10, 20):
                    worker_app.send("note", n)
                worker_app.settled()
        finally:
            os.kill(paused.pid, signal.SIGCONT)
        # The paused worker has read all that it had.
        worker_app.wait_responsive()
    assert sorted(map(int, worker_app.witness.reports("ran")[30:])) == [*range(20)]
    assert worker_app.dead() == {}


@pytest.mark.parametrize("finder", ["heartbeat", "claim"])
def test_a_paused_solo_worker_starts_nothing_of_a_claim_that_it_had_not_read(
    worker_app: WorkerApp, open_app: OpenApp, proxy: Proxy, finder: str
) -> None:
    claim = load_scripts()["claim"].sha1.encode()
    far = open_app(port=proxy.port, dq_lease=LEASE_S, task_default_queue=worker_app.queue)
    with far.worker("solo", 1) as paused:
        worker_app.send("note", "warm")
        worker_app.ran(1)
        worker_app.settled()
        proxy.hold_answers_to, proxy.holds_left = claim, 1
        worker_app.send("note", 0)
        wait_until(lambda: proxy.held, 30)
        os.kill(paused.pid, signal.SIGSTOP)
        try:
            with worker_app.worker("threads", 1):
                assert worker_app.ran(2)[1:] == ["0"]
                if finder == "heartbeat":
                    # It renews the lease before the main thread reads the answer of the claim. Either of
                    # two rules is enough then: the claim is void, or was disowned for its late answer.
                    os.kill(paused.pid, signal.SIGRTMIN)
                    os.kill(paused.pid, signal.SIGCONT)
                    wait_until(lambda: worker_app.client.zcard(worker_app.keys.leases) == 2, 30)
                    proxy.release_answers.set()
                    worker_app.witness.release("main thread")
                else:
                    proxy.release_answers.set()
                    os.kill(paused.pid, signal.SIGCONT)
                for n in range(1, 11):
                    worker_app.send("note", n)
                worker_app.ran(12)
                worker_app.settled()
                worker_app.wait_responsive()
        finally:
            os.kill(paused.pid, signal.SIGCONT)
    assert sorted(map(int, worker_app.witness.reports("ran")[1:])) == [*range(11)]
    assert worker_app.dead() == {}
