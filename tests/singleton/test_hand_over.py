"""How leadership passes on: by force, one worker after the other, and in a pool whose loop sleeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.singleton.bank import QUEUE
from tests.singleton.office import DEADLINE_S, SESSION_S, Bank


def resign(bank: Bank, worker: str) -> None:
    bank.app.control.broadcast("resign", {"queue": QUEUE}, destination=[worker], reply=True, timeout=30.0)


@pytest.mark.parametrize("hired", [2, 1])
def test_abort_kills_what_runs_and_it_runs_again(hired: int, open_bank: Callable[..., Bank]) -> None:
    """By order, elsewhere; and because the term has fallen, in the next term of a worker that is alone."""
    bank = open_bank(dq_singleton_queues={QUEUE: {"hand_over": "abort"}}, without_rounds=True)
    with ExitStack() as stack:
        for _ in range(hired):
            stack.enter_context(bank.worker())
        leader = bank.leader(hired)
        bank.post(range(2))
        bank.finished(2)
        bank.post(range(2, 3), task="spin_once", seconds=60)
        bank.wait_started(2)
        bank.post(range(3, 6))
        if hired > 1:
            resign(bank, leader)
        else:
            bank.depose()
        assert bank.finished(6) == list(range(6))
    starts = [(entry.number, entry.token) for entry in bank.book.entries("start")]
    assert starts == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (5, 2)]


def test_a_rolling_restart_loses_and_reorders_nothing_and_runs_nothing_twice(till: Bank) -> None:
    sent = 0
    workers = [till.worker() for _ in range(2)]
    try:
        for worker in workers:
            worker.start().wait_ready()
        till.leader(2)
        for _ in range(3):
            till.post(range(sent, sent + 40), seconds=0.02)
            sent += 40
            till.wait_started(sent - 30)
            workers.append(till.worker().start())
            workers[-1].wait_ready()
            workers.pop(0).stop(deadline=DEADLINE_S)
        assert till.finished(sent) == list(range(sent))
    finally:
        for worker in workers:
            worker.discard()
    assert till.book.numbers("start") == list(range(sent))
    assert till.overlaps() == 0
    assert len({entry.token for entry in till.book.entries()}) >= 2


@pytest.mark.parametrize("stops", [False, True], ids=["resigns", "stops"])
def test_gevent_hands_over_within_its_two_seconds_and_a_half(till: Bank, stops: bool) -> None:
    conf = {"dq_lease": 3 * SESSION_S}
    with till.worker("gevent", conf=conf) as one, till.worker("gevent", conf=conf) as two:
        leader = till.leader(2)
        till.post(range(60), seconds=0.02)
        till.wait_started(10)
        if stops:
            (one if one.name == leader else two).stop(deadline=DEADLINE_S)
        else:
            resign(till, leader)
        # However late that was, something is left for the other one.
        till.post(range(60, 70))
        assert till.finished(70) == list(range(70))
    starts, finishes = till.book.entries("start"), till.book.entries("finish")
    first = next(number for number, entry in enumerate(starts) if entry.token == 2)
    assert starts[first].monotonic - finishes[first - 1].monotonic < 2.5
    assert till.overlaps() == 0
