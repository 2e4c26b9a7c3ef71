"""What a worker holds: kept as long as it lives, given back soon after it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.yard import Yard

#: Longer than a machine stands still now and then: who is slow is not dead.
LEASE_S = 2.0


@pytest.fixture
def yard(redis_server: RedisServer) -> Iterator[Yard]:
    for db in (1, 2, 3):
        redis_server.flush(db)
    yard = Yard(redis_server, dq_lease=LEASE_S)
    yield yard
    yard.close()


def first_lease_s(yard: Yard) -> float:
    """How long the first lease will last, by the server's clock."""
    ((_, ends_us),) = yard.client.zrange(yard.keys.leases, 0, 0, withscores=True)
    seconds, microseconds = yard.client.time()
    return float(ends_us / 1e6 - seconds - microseconds / 1e6)


@pytest.mark.parametrize(("pool", "task"), [("solo", "nap"), ("solo", "spin"), ("gevent", "spin")])
def test_a_long_task_keeps_its_message(yard: Yard, pool: str, task: str) -> None:
    yard.send(task, 2.1 * LEASE_S)
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
        wait_until(lambda: not victim.alive)
    # Then nothing is its own for longer than its lease.
    assert first_lease_s(yard) <= LEASE_S
    yard.send("note", "younger")
    yard.send("hold", "gate", priority=9)
    with yard.worker("threads", 1):
        yard.ran(2, subject="began")
        wait_until(lambda: yard.client.zcard(yard.keys.leases) == 1, 30)
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
                yard.ran(2, subject="began")
                yard.witness.release("first", 2)  # the paused one stands first in line
                yard.ran(35)
                os.kill(paused.pid, signal.SIGCONT)
                yard.ran(2, subject="ended")
                yard.send("note", "last")
                told = yard.ran(36)
                assert sorted(told[30:]) == sorted([str(n) for n in range(5)] + ["last"])
                yard.settled()
        finally:
            os.kill(paused.pid, signal.SIGCONT)
    assert yard.dead() == {}
