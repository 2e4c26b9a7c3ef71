"""Requests that are made before their turn, and how their turn does not come.

A pool of one slot is given messages before the one that runs has ended. Each test sees to it that some are
there, then lets the one that runs end in another way than it should.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.proxy import Proxy
from tests.singleton.bank import QUEUE
from tests.singleton.office import DEADLINE_S, Bank
from tests.workers import WorkerProcess

#: Messages before the one that is waited for: so many that the worker has learnt to be given more at a time.
BEFORE, AFTER = 30, 20
ALL = list(range(BEFORE + AFTER))
TIME_LIMIT_S = 3


# What is claimed ahead must not depend on how fast this machine is just now.
def one_slot(bank: Bank, pool: str = "prefork") -> WorkerProcess:
    return bank.worker(pool, 1, conf={"worker_prefetch_multiplier": 16, "dq_claim_ahead": 2})


def crowd(bank: Bank, worker: WorkerProcess, task: str = "hold", base: int = 0, **options: object) -> str:
    """Let number `base` + :data:`BEFORE` run while requests wait behind it; returns its task id."""
    bank.post(range(base, base + BEFORE))
    running = bank.send(task, base + BEFORE, **options)
    bank.post(range(base + BEFORE + 1, base + BEFORE + AFTER))
    bank.wait_started(base + BEFORE)
    wait_until(
        # Where a time limit ends it first, nothing is left to be waited for.
        lambda: len(reserved(bank, worker)) > 2 or base + BEFORE + 1 in bank.book.numbers("start"),
        DEADLINE_S,
        what="requests behind the one that runs",
    )
    return str(running.id)


def reserved(bank: Bank, worker: WorkerProcess) -> list[str]:
    """The ids of what the worker has and has not begun."""
    answer = bank.app.control.inspect([worker.name], timeout=10.0).reserved() or {}
    return [row["id"] for rows in answer.values() for row in rows]


def pid_of(bank: Bank, number: int) -> int:
    return next(entry.pid for entry in bank.book.entries("start") if entry.number == number)


def test_what_is_behind_a_child_that_dies_begins_in_the_next_one_and_in_order(till: Bank) -> None:
    """It is killed, its task is terminated, and its task runs into the hard time limit."""
    everything = list(range(3 * len(ALL)))
    doomed = [round_ * len(ALL) + BEFORE for round_ in range(3)]
    left = [number for number in everything if number not in doomed]
    with one_slot(till) as worker:
        crowd(till, worker)
        os.kill(pid_of(till, doomed[0]), signal.SIGKILL)
        # They were acknowledged when they began: they are not run again.
        till.finished(len(ALL) - 1, DEADLINE_S)
        running = crowd(till, worker, base=len(ALL))
        till.app.control.revoke(running, terminate=True, signal="SIGKILL")
        till.finished(2 * (len(ALL) - 1), DEADLINE_S)
        crowd(till, worker, base=2 * len(ALL), time_limit=TIME_LIMIT_S)
        assert till.finished(len(left), DEADLINE_S) == left
    assert till.book.numbers("start") == everything
    pids = {entry.number: entry.pid for entry in till.book.entries("start")}
    assert len({pids[number] for number in doomed}) == 3
    assert all(pids[number] != pids[number + 1] for number in doomed)


def test_what_comes_back_from_a_killed_child_goes_before_what_is_behind_it(till: Bank) -> None:
    with one_slot(till) as worker:
        crowd(till, worker, "hold_late")
        os.kill(pid_of(till, BEFORE), signal.SIGKILL)
        wait_until(lambda: till.book.numbers("start").count(BEFORE) == 2, DEADLINE_S)
        till.book.release(str(BEFORE))
        assert till.finished(len(ALL), DEADLINE_S) == ALL
    assert till.book.numbers("start") == sorted([*ALL, BEFORE])


def test_a_retry_goes_before_what_is_behind_it(till: Bank) -> None:
    with one_slot(till, "threads") as worker:
        crowd(till, worker, "hold_and_retry")
        till.book.release(str(BEFORE), 2)
        assert till.finished(len(ALL), DEADLINE_S) == ALL
    assert till.book.numbers("start") == sorted([*ALL, BEFORE])
    assert till.overlaps() == 1  # a retry ends without a word in the book


def test_a_retry_goes_before_what_is_behind_one_that_never_runs(till: Bank) -> None:
    till.post(range(BEFORE))
    till.send("hold_and_retry", BEFORE)
    # Expired when it is claimed: it is over before its turn.
    till.send("post", BEFORE + 1, expires=0.001)
    till.post(range(BEFORE + 2, BEFORE + AFTER))
    left = [number for number in ALL if number != BEFORE + 1]
    with one_slot(till):
        till.wait_started(BEFORE)
        till.book.release(str(BEFORE), 2)
        assert till.finished(len(left), DEADLINE_S) == left
    assert till.book.numbers("start") == sorted([*left, BEFORE])


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_revoked_one_is_passed_over(till: Bank, pool: str) -> None:
    with one_slot(till, pool) as worker:
        till.post(range(BEFORE))
        till.send("hold", BEFORE)
        doomed = [till.send("post", number).id for number in range(BEFORE + 1, BEFORE + 4)]
        till.post(range(BEFORE + 4, BEFORE + AFTER))
        till.wait_started(BEFORE)
        wait_until(lambda: set(doomed) <= set(reserved(till, worker)), DEADLINE_S)
        assert till.app.control.revoke(doomed[1:], destination=[worker.name], reply=True, timeout=DEADLINE_S)
        till.book.release(str(BEFORE))
        left = [number for number in ALL if number not in (BEFORE + 2, BEFORE + 3)]
        assert till.finished(len(left), DEADLINE_S) == left
    assert till.book.numbers("start") == left


def test_an_abort_gives_back_what_is_behind(open_bank: Callable[..., Bank]) -> None:
    bank = open_bank(dq_singleton_queues={QUEUE: {"hand_over": "abort"}})
    with one_slot(bank) as first:
        crowd(bank, first, "hold_late")
        with one_slot(bank):
            bank.app.control.broadcast("resign", {"queue": QUEUE}, destination=[first.name])
            wait_until(lambda: bank.book.numbers("start").count(BEFORE) == 2, DEADLINE_S)
            bank.book.release(str(BEFORE))
            assert bank.finished(len(ALL), DEADLINE_S) == ALL
    assert bank.book.numbers("start") == sorted([*ALL, BEFORE])
    assert {entry.token for entry in bank.book.entries("start") if entry.number > BEFORE} == {2}


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_stops_gives_back_what_is_behind(till: Bank, pool: str) -> None:
    with one_slot(till, pool) as first:
        crowd(till, first)
        with one_slot(till, pool):
            assert first.process is not None
            first.process.terminate()
            first.wait_for_log("Warm shutdown", DEADLINE_S)
            till.book.release(str(BEFORE))
            assert till.finished(len(ALL), DEADLINE_S) == ALL
            assert first.wait(DEADLINE_S) == 0
            log = first.log
    assert till.book.numbers("start") == ALL
    assert till.book.entries("finish")[-1].token == 2
    assert till.overlaps() == 0
    assert "was not handed over in time" not in log


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_lost_connection_gives_back_what_is_behind(
    till: Bank, redis_server: RedisServer, pool: str
) -> None:
    with Proxy(redis_server.port) as proxy:
        till.conf["broker_url"] = proxy.url(till.conf["broker_url"])
        with one_slot(till, pool) as worker:
            crowd(till, worker)
            proxy.cut_all()
            worker.wait_for_log("Connection to broker lost", DEADLINE_S)
            till.book.release(str(BEFORE))
            assert till.finished(len(ALL), DEADLINE_S) == ALL
    assert till.book.numbers("start") == ALL
    assert till.overlaps() == 0


def claims(bank: Bank) -> int:
    """How many claims have brought something."""
    with bank.app.connection_for_write() as connection:
        channel: Any = connection.default_channel
        return int(channel.client.hget(channel.partition(QUEUE).keys.state, "claim") or 0)


def wait_more(count: Callable[[], int], before: int) -> None:
    wait_until(lambda: count() > before, DEADLINE_S, what=f"more than {before}")


@pytest.mark.parametrize("slots", [1, 4])
def test_what_comes_back_after_a_lost_connection_goes_before_what_was_claimed_since(
    till: Bank, redis_server: RedisServer, slots: int
) -> None:
    """A retry, and what a killed child was running: both have begun before the connection was lost."""
    conf = {"worker_prefetch_multiplier": 16, "dq_claim_ahead": 2}
    with Proxy(redis_server.port) as proxy:
        till.conf["broker_url"] = proxy.url(till.conf["broker_url"])
        with till.worker("prefork", slots, conf=conf) as worker:
            till.post(range(2))  # from these it has learnt that it may claim ahead
            for turn, task in enumerate(["hold_and_retry", "hold_late"]):
                first = 2 + 3 * turn
                till.send(task, first)
                till.wait_started(first)
                before = claims(till)
                proxy.cut_all()
                worker.wait_for_log("Connected to", DEADLINE_S, occurrences=turn + 2)
                till.post(range(first + 1, first + 3))
                wait_more(partial(claims, till), before)
                if task == "hold_late":
                    os.kill(pid_of(till, first), signal.SIGKILL)
                else:
                    till.book.release(str(first))
                # Whatever begins next: the one that has come back, and holds again.
                wait_more(lambda: len(till.book.numbers("start")), first + turn + 1)
                till.book.release(str(first))
                till.finished(first + 3, DEADLINE_S)
    assert till.book.numbers("start") == [0, 1, 2, 2, 3, 4, 5, 5, 6, 7]
