"""What a worker holds: kept as long as it lives, given back soon after it dies."""

from __future__ import annotations

import os
import signal
import time

import pytest

from celery_dq.testing.waiting import wait_until
from tests.broker.yard import Yard


@pytest.mark.parametrize(("pool", "task"), [("solo", "nap"), ("solo", "spin"), ("gevent", "spin")])
def test_a_long_task_keeps_its_message(yard: Yard, pool: str, task: str) -> None:
    yard.send(task, 2.3)
    with yard.worker(pool, 1):
        yard.ran(1, subject="began")
        with yard.worker("threads", 1):
            yard.ran(1, subject="ended")
            yard.settled()
    assert yard.witness.told("began") == [task]
    assert yard.dead() == {}


@pytest.mark.parametrize("pool", ["solo", "prefork", "threads", "gevent"])
def test_what_a_killed_worker_had_comes_back_in_order(yard: Yard, pool: str) -> None:
    yard.send("hold_late", "first")
    for n in range(6):
        yard.send("note", n)
    with yard.worker(pool, 1) as victim:
        yard.ran(1, subject="began")
        for child in victim.children():
            child.kill()
        os.kill(victim.pid, signal.SIGKILL)
        since = time.monotonic()
        wait_until(lambda: not victim.alive)
    yard.send("note", "younger")
    yard.send("hold", "gate", priority=9)
    with yard.worker("threads", 1):
        yard.ran(2, subject="began")
        wait_until(lambda: yard.client.zcard(yard.keys.leases) == 1, 5)
        assert time.monotonic() - since < 6
        yard.witness.release("gate")
        yard.witness.release("first", 2)
        told = yard.ran(7)
        # One that was in the dead worker's hands goes alone, so its neighbour may pass it; none comes behind.
        assert sorted(told[:2]) == ["0", "1"]
        assert told[2:] == ["2", "3", "4", "5", "younger"]
        assert yard.witness.told("began") == ["first", "gate", "first"]
        yard.settled()
    assert yard.dead() == {}


def test_a_paused_worker_starts_nothing_stale(yard: Yard) -> None:
    """SIGSTOP for longer than the lease: another worker takes over, and the first one notices."""
    # Three run, and some wait behind them in the worker's hands.
    with yard.worker("threads", 1) as paused:
        for n in range(30):
            yard.send("note", f"warm-{n}")
        yard.ran(30)
        yard.send("hold_late", "first")
        yard.ran(1, subject="began")
        for n in range(5):
            yard.send("note", n)
        os.kill(paused.pid, signal.SIGSTOP)
        try:
            with yard.worker("threads", 1):
                yard.ran(2, subject="began", timeout_s=8)
                yard.witness.release("first", 2)  # the paused one stands first in line
                yard.ran(35, timeout_s=8)
                os.kill(paused.pid, signal.SIGCONT)
                yard.ran(2, subject="ended")
                yard.send("note", "last")
                told = yard.ran(36)
                assert sorted(told[30:]) == sorted([str(n) for n in range(5)] + ["last"])
                yard.settled()
        finally:
            os.kill(paused.pid, signal.SIGCONT)
    assert yard.dead() == {}
