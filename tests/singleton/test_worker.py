"""Workers that volunteer for a led queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from celery_dq.testing.waiting import wait_until
from tests.singleton.bank import QUEUE
from tests.singleton.office import DEADLINE_S, SESSION_S, SHORT_S, Bank
from tests.workers import ENVIRONMENT, ROOT

#: A pool of one slot is given messages ahead; any other pool is not.
POOLS = pytest.mark.parametrize(
    ("pool", "concurrency"), [("prefork", 4), ("prefork", 1), ("threads", 1), ("solo", 1)]
)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_messages_run_one_after_the_other_with_the_token(bank: Bank, pool: str) -> None:
    posted = bank.post(range(30))
    with bank.worker(pool=pool, concurrency=4):
        assert bank.finished(30) == posted
    assert bank.overlaps() == 0
    assert {entry.token for entry in bank.book.entries()} == {1}


def test_who_stands_by_takes_over_when_the_leader_stops(bank: Bank) -> None:
    # Whatever else than its hand-over could let another one in would take as long as a session.
    conf = {"dq_lease": 3 * SESSION_S}
    first = bank.worker(conf=conf)
    with first:
        bank.post(range(3))
        bank.finished(3)
        second = bank.worker(conf=conf)
        with second:
            bank.send("hold", 3)
            bank.wait_started(3)
            bank.post(range(4, 10))
            assert first.process is not None
            first.process.terminate()
            first.wait_for_log("Warm shutdown", DEADLINE_S)
            bank.book.release("3")
            assert bank.finished(10) == list(range(10))
            assert first.wait(DEADLINE_S) == 0
            handed_over = bank.book.entries("finish")[3].monotonic
            taken_over = bank.book.entries("start")[4].monotonic
    assert {entry.token for entry in bank.book.entries("finish")[:4]} == {1}
    assert {entry.token for entry in bank.book.entries("finish")[4:]} == {2}
    assert bank.overlaps() == 0
    # Half a second for us; half a second per process is what Celery takes to see that a task has ended once
    # its event loop has stopped.
    assert taken_over - handed_over < 0.5 + 2 * 0.5


@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_a_killed_leader_is_replaced_and_nothing_is_lost_or_reordered(
    open_bank: Callable[..., Bank], election: str, task: str
) -> None:
    bank = open_bank(election=election, dq_election_session=SHORT_S)
    first = bank.worker()
    with first:
        bank.post(range(2))
        bank.finished(2)
        with bank.worker():
            bank.send(task, 2)
            bank.wait_started(2)
            bank.post(range(3, 8))
            children = first.children()
            assert first.process is not None
            first.process.kill()
            first.wait(DEADLINE_S)
            if task == "hold":
                # Acknowledged when it began: it is not run again.
                assert bank.finished(7) == [0, 1, 3, 4, 5, 6, 7]
            else:
                bank.wait_started(2, times=2)
                # One for the dead, if their connection has not been missed.
                bank.book.release("2", 2)
                assert bank.finished(8) == list(range(8))
                before, after = (each.token for each in bank.book.entries("start") if each.number == 2)
                assert before < after
            for child in children:
                child.wait(30)  # the guard's alarm has ended them
    assert bank.overlaps() <= 1


def test_a_paused_leader_takes_no_further_message_and_its_late_words_are_refused(
    open_bank: Callable[..., Bank], election: str
) -> None:
    bank = open_bank(election=election, dq_election_session=SHORT_S)
    first = bank.worker()
    with first:
        bank.post(range(2))
        bank.finished(2)
        with bank.worker():
            bank.send("hold_late", 2)
            bank.wait_started(2)
            bank.post(range(3, 6))
            processes = [psutil.Process(first.pid), *first.children()]
            for process in processes:
                process.suspend()
            bank.wait_started(2, times=2)
            # The paused one is let go first: it has waited for longer, and would have a word to say.
            bank.book.release("2", 2)
            assert bank.finished(6) == list(range(6))
            for process in processes:
                process.resume()
            bank.post(range(6, 9))
            assert bank.finished(9) == list(range(9))
    tokens = [entry.token for entry in bank.book.entries("finish")]
    assert tokens == [tokens[0]] * 2 + [tokens[-1]] * 7
    assert tokens[0] < tokens[-1]
    assert bank.book.numbers("start").count(2) == 2
    assert bank.book.refused() == []


def test_a_resignation_hands_over_within_half_a_second(bank: Bank) -> None:
    conf = {"dq_lease": 3 * SESSION_S}
    with bank.worker(conf=conf), bank.worker(conf=conf):
        leader = bank.leader(2)
        bank.post(range(40), seconds=0.02)
        bank.wait_started(20)
        bank.app.control.broadcast("resign", {"queue": QUEUE}, destination=[leader], reply=True, timeout=30.0)
        # However late that was, something is left for the other one.
        bank.post(range(40, 60))
        assert bank.finished(60) == list(range(60))
    starts, finishes = bank.book.entries("start"), bank.book.entries("finish")
    assert {entry.token for entry in starts} == {1, 2}
    first = next(number for number, entry in enumerate(starts) if entry.token == 2)
    assert starts[first].monotonic - finishes[first - 1].monotonic < 0.5
    assert bank.overlaps() == 0


@POOLS
def test_a_requeued_message_goes_before_what_was_fetched_after_it(
    till: Bank, pool: str, concurrency: int
) -> None:
    till.post(range(3))
    till.post(range(3, 4), task="reject_once")
    till.post(range(4, 30))
    with till.worker(pool, concurrency):
        assert till.finished(30) == list(range(30))


def test_celery_inspect_tells_who_leads(till: Bank) -> None:
    with till.worker(), till.worker():
        leader = till.leader(2)
        answers = {node: rows[0] for node, rows in till.leaders(2).items()}
        assert len(answers) == 2
        assert answers[leader]["token"] == 1
        assert answers[leader]["phase"] == "executing"
        assert abs(answers[leader]["since"] - time.time()) < 60
        other = next(row for node, row in answers.items() if node != leader)
        assert (other["leads"], other["phase"]) == (False, "standing by")


def test_other_queues_of_the_worker_are_consumed_by_all(till: Bank) -> None:
    with till.worker(queues=[QUEUE, "mail"]), till.worker(queues=[QUEUE, "mail"]):
        till.leader(2)
        till.post(range(5))
        for number in range(100, 108):
            till.send("post", number, 0.2, queue="mail")
        wait_until(lambda: len(till.book.numbers("finish")) + len(till.book.refused()) >= 13, DEADLINE_S)
        assert [number for number in till.book.numbers("finish") if number < 100] == list(range(5))


@POOLS
def test_a_retry_keeps_its_place_and_blocks_until_it_is_due(till: Bank, pool: str, concurrency: int) -> None:
    countdowns = [0.0, 1.0]
    till.post(range(2))
    for number, countdown in enumerate(countdowns, 2):
        till.send("retry", number, countdown)
    till.post(range(4, 20))
    with till.worker(pool, concurrency):
        assert till.finished(20) == list(range(20))
    for number, countdown in enumerate(countdowns, 2):
        first, second = (each for each in till.book.entries("start") if each.number == number)
        assert second.monotonic - first.monotonic >= countdown
    assert till.book.numbers("start") == [0, 1, 2, 2, 3, 3, *range(4, 20)]


def test_a_retry_that_waits_is_handed_over_in_its_place(till: Bank) -> None:
    with till.worker() as first:
        till.leader()
        with till.worker():
            till.send("retry", 0, 3.0)
            till.post(range(1, 5))
            first.wait_for_log("Retry in", DEADLINE_S)
            assert first.process is not None
            first.process.kill()
            first.wait(DEADLINE_S)
            till.depose()  # no need to wait for the end of its session
            assert till.finished(5) == list(range(5))
    assert [each.token for each in till.book.entries("start")][:2] == [1, 2]


def test_leadership_spreads_over_the_workers(open_bank: Callable[..., Bank], election: str) -> None:
    queues = [f"ledger-{number}" for number in range(4)]
    bank = open_bank(election=election, dq_singleton_queues=queues)

    def leads(workers: int) -> list[int]:
        return sorted(sum(row["leads"] for row in rows) for rows in bank.leaders(workers).values())

    def shared_as(*shares: int) -> None:
        wait_until(
            lambda: leads(len(shares)) == list(shares), DEADLINE_S, what=lambda: str(leads(len(shares)))
        )

    with bank.worker(queues=queues):
        shared_as(4)
        with bank.worker(queues=queues):
            shared_as(2, 2)
        shared_as(4)


def test_who_is_told_to_consume_no_more_hands_over_and_may_volunteer_again(till: Bank) -> None:
    with till.worker(), till.worker(queues=["mail"]):
        leader = till.leader(2)
        till.post(range(3))
        till.finished(3)
        till.app.control.cancel_consumer(QUEUE, destination=[leader], reply=True, timeout=30.0)
        wait_until(lambda: not leads(till), DEADLINE_S)
        till.post(range(3, 6))
        till.app.control.add_consumer(QUEUE, destination=["w2@proof"], reply=True, timeout=30.0)
        assert till.finished(6) == list(range(6))
        assert till.leader(2) == "w2@proof"
        till.app.control.add_consumer(QUEUE, destination=[leader], reply=True, timeout=30.0)
        till.app.control.cancel_consumer(QUEUE, destination=["w2@proof"], reply=True, timeout=30.0)
        till.post(range(6, 9))
        assert till.finished(9) == list(range(9))
    assert till.overlaps() == 0
    assert sorted({entry.token for entry in till.book.entries()}) == [1, 2, 3]


def leads(bank: Bank) -> list[str]:
    """Those of two workers that lead the queue."""
    return [
        node
        for node, rows in bank.leaders(2).items()
        if any(row["leads"] and row["queue"] == QUEUE for row in rows)
    ]


def test_the_celery_program_knows_the_commands(till: Bank) -> None:
    with till.worker() as worker:
        till.leader()
        run = subprocess.run(
            [
                *(sys.executable, "-m", "celery", "-A", "tests.singleton.bank", "inspect"),
                # Over as soon as the one that is asked has answered.
                *("--timeout", "30", "--destination", worker.name, "--json", "leaders"),
            ],
            cwd=ROOT,
            env={**os.environ, ENVIRONMENT: json.dumps({"broker": "dq", "conf": till.conf})},
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(run.stdout)[worker.name]
    assert (row["queue"], row["leads"], row["token"]) == (QUEUE, True, 1)
