"""Workers that are candidates for a singleton queue."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import psutil
import pytest
from celery.app.defaults import DEFAULTS

from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.preloaded import run_python
from tests.singleton.posting_app import QUEUE
from tests.singleton.posting_workers import DEADLINE_S, SESSION_S, SHORT_S, PostingWorkers
from tests.workers import environment

#: A pool of one slot gets messages ahead; other pools do not.
POOLS = pytest.mark.parametrize(
    ("pool", "concurrency"), [("prefork", 4), ("prefork", 1), ("threads", 1), ("solo", 1)]
)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_messages_run_one_after_the_other_with_the_token(posting: PostingWorkers, pool: str) -> None:
    posted = posting.post(range(30))
    with posting.worker(pool=pool, concurrency=4):
        assert posting.finished(30) == posted
    assert posting.overlaps() == 0
    assert {entry.token for entry in posting.book.entries()} == {1}


def test_a_standby_worker_takes_over_when_the_leader_stops(posting: PostingWorkers) -> None:
    # Any other way than a hand-over to let another worker lead would take as long as a session.
    conf = {"dq_lease": 3 * SESSION_S}
    first = posting.worker(conf=conf)
    with first:
        posting.post(range(3))
        posting.finished(3)
        second = posting.worker(conf=conf)
        with second:
            posting.send("hold", 3)
            posting.wait_started(3)
            posting.post(range(4, 10))
            os.kill(first.pid, signal.SIGTERM)
            first.wait_for_log("Warm shutdown", DEADLINE_S)
            posting.book.release("3")
            assert posting.finished(10) == list(range(10))
            assert first.wait(DEADLINE_S) == 0
            handed_over = posting.book.entries("finish")[3].monotonic
            taken_over = posting.book.entries("start")[4].monotonic
    assert {entry.token for entry in posting.book.entries("finish")[:4]} == {1}
    assert {entry.token for entry in posting.book.entries("finish")[4:]} == {2}
    assert posting.overlaps() == 0
    # celery-dq may take half a second. Celery takes half a second per process to notice the end of a task
    # after its event loop has stopped.
    assert taken_over - handed_over < 0.5 + 2 * 0.5


@pytest.mark.parametrize(
    ("election", "task"), [("redis", "hold"), ("zookeeper", "hold_late")], indirect=["election"]
)
def test_a_killed_leader_is_replaced_and_nothing_is_lost_or_reordered(
    open_posting: Callable[..., PostingWorkers], election: str, task: str
) -> None:
    posting = open_posting(election=election, dq_election_session=SHORT_S)
    first = posting.worker()
    with first:
        posting.post(range(2))
        posting.finished(2)
        with posting.worker():
            posting.send(task, 2)
            posting.wait_started(2)
            posting.post(range(3, 8))
            children = first.children()
            first.stop(signal.SIGKILL)
            if task == "hold":
                # The message was acknowledged at its start, so it does not run again.
                assert posting.finished(7) == [0, 1, 3, 4, 5, 6, 7]
            else:
                posting.wait_started(2, times=2)
                # One release is for the dead worker's run, if the broker has not noticed its closed
                # connection.
                posting.book.release("2", 2)
                assert posting.finished(8) == list(range(8))
                before, after = (each.token for each in posting.book.entries("start") if each.number == 2)
                assert before < after
            for child in children:
                child.wait(30)  # the guard's alarm has killed them
    assert posting.overlaps() <= 1


def test_a_paused_leader_takes_no_further_message_and_its_late_words_are_refused(
    open_posting: Callable[..., PostingWorkers], election: str
) -> None:
    posting = open_posting(election=election, dq_election_session=SHORT_S)
    first = posting.worker()
    with first:
        posting.post(range(2))
        posting.finished(2)
        with posting.worker():
            posting.send("hold_late", 2)
            posting.wait_started(2)
            posting.post(range(3, 6))
            processes = [psutil.Process(first.pid), *first.children()]
            for process in processes:
                process.suspend()
            posting.wait_started(2, times=2)
            # The stopped worker is released first, because it has waited for longer and would write to the
            # book.
            posting.book.release("2", 2)
            assert posting.finished(6) == list(range(6))
            for process in processes:
                process.resume()
            posting.post(range(6, 9))
            assert posting.finished(9) == list(range(9))
    tokens = [entry.token for entry in posting.book.entries("finish")]
    assert tokens == [tokens[0]] * 2 + [tokens[-1]] * 7
    assert tokens[0] < tokens[-1]
    assert posting.book.numbers("start").count(2) == 2
    assert posting.book.refused() == []


def test_a_resignation_hands_over_within_half_a_second(posting: PostingWorkers) -> None:
    conf = {"dq_lease": 3 * SESSION_S}
    with posting.worker(conf=conf), posting.worker(conf=conf):
        leader = posting.leader(2)
        posting.post(range(40), seconds=0.02)
        posting.wait_started(20)
        posting.app.control.broadcast(
            "resign", {"queue": QUEUE}, destination=[leader], reply=True, timeout=30.0
        )
        # Even after a late change of leadership, messages are left for the other worker.
        posting.post(range(40, 60))
        assert posting.finished(60) == list(range(60))
    starts, finishes = posting.book.entries("start"), posting.book.entries("finish")
    assert {entry.token for entry in starts} == {1, 2}
    first = next(number for number, entry in enumerate(starts) if entry.token == 2)
    assert starts[first].monotonic - finishes[first - 1].monotonic < 0.5
    assert posting.overlaps() == 0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_running_task_can_ask_whether_its_term_ends(redis_posting: PostingWorkers, pool: str) -> None:
    with redis_posting.worker(pool, 1):
        redis_posting.send("work_on", 1)
        redis_posting.wait_started(1)
        redis_posting.app.control.broadcast("resign", {"queue": QUEUE}, reply=True, timeout=30.0, limit=1)
        assert redis_posting.finished(1, 10) == [1]


@POOLS
def test_a_requeued_message_goes_before_messages_fetched_after_it(
    redis_posting: PostingWorkers, pool: str, concurrency: int
) -> None:
    redis_posting.post(range(3))
    redis_posting.post(range(3, 4), task="reject_once")
    redis_posting.post(range(4, 30))
    with redis_posting.worker(pool, concurrency):
        assert redis_posting.finished(30) == list(range(30))


@POOLS
@pytest.mark.parametrize("task", ["throttled_once", "throttled_once_late"])
def test_a_throttled_message_keeps_its_place_and_blocks_until_the_end_of_the_pause(
    redis_posting: PostingWorkers, pool: str, concurrency: int, task: str
) -> None:
    redis_posting.post(range(3))
    redis_posting.post(range(3, 5), task=task)
    redis_posting.post(range(5, 30))
    with redis_posting.worker(pool, concurrency):
        assert redis_posting.finished(30) == list(range(30))


def test_celery_inspect_reports_the_leader(redis_posting: PostingWorkers) -> None:
    with redis_posting.worker() as one, redis_posting.worker() as two:
        leader = redis_posting.leader(2)
        run = run_python(
            *("-m", "celery", "-A", "tests.singleton.posting_app", "inspect"),
            # The command ends as soon as the addressed workers have answered.
            *("--timeout", "30", "--destination", f"{one.name},{two.name}", "--json", "leaders"),
            environment=environment(BROKERS["dq"], redis_posting.conf),
            timeout_s=90,
        )
    assert run.returncode == 0, run.stderr
    answers = {node: row for node, (row,) in json.loads(run.stdout).items()}
    assert len(answers) == 2
    row = answers.pop(leader)
    assert (row["queue"], row["leads"], row["token"], row["phase"]) == (QUEUE, True, 1, "executing")
    since = datetime.fromisoformat(row["since"])
    assert abs(datetime.now(timezone.utc) - since) < timedelta(minutes=1)
    (other,) = answers.values()
    assert (other["leads"], other["phase"], other["since"]) == (False, "standing by", None)


def test_other_queues_of_the_worker_are_consumed_by_all(redis_posting: PostingWorkers) -> None:
    with redis_posting.worker(queues=[QUEUE, "mail"]), redis_posting.worker(queues=[QUEUE, "mail"]):
        redis_posting.leader(2)
        redis_posting.post(range(5))
        for number in range(100, 108):
            redis_posting.send("post", number, 0.2, queue="mail")
        wait_until(
            lambda: len(redis_posting.book.numbers("finish")) + len(redis_posting.book.refused()) >= 13,
            DEADLINE_S,
        )
        assert [number for number in redis_posting.book.numbers("finish") if number < 100] == list(range(5))


@POOLS
def test_a_retry_keeps_its_place_and_blocks_until_it_is_due(
    redis_posting: PostingWorkers, pool: str, concurrency: int
) -> None:
    countdowns = [0.0, 1.0]
    redis_posting.post(range(2))
    for number, countdown in enumerate(countdowns, 2):
        redis_posting.send("retry", number, countdown)
    redis_posting.post(range(4, 20))
    with redis_posting.worker(pool, concurrency):
        assert redis_posting.finished(20) == list(range(20))
    for number, countdown in enumerate(countdowns, 2):
        first, second = (each for each in redis_posting.book.entries("start") if each.number == number)
        assert second.monotonic - first.monotonic >= countdown
    assert redis_posting.book.numbers("start") == [0, 1, 2, 2, 3, 3, *range(4, 20)]


def test_a_retry_keeps_its_place_although_the_calls_of_tasks_are_buffered(
    redis_posting: PostingWorkers,
) -> None:
    conf = {"dq_buffer": True, "dq_buffer_in_workers": True, "dq_buffer_folder": "", "dq_buffer_linger": "1s"}
    redis_posting.post(range(2))
    redis_posting.send("retry", 2)
    redis_posting.post(range(3, 10))
    with redis_posting.worker("threads", 1, conf=conf):
        assert redis_posting.finished(10) == list(range(10))


@pytest.mark.parametrize("ahead_s", [600, -600])
def test_a_retry_is_due_by_the_clock_of_redis(
    open_posting: Callable[..., PostingWorkers], ahead_s: float
) -> None:
    posting = open_posting(clock_ahead_s=ahead_s)
    posting.send("retry", 0, countdown := 0.7)
    posting.post(range(1, 3))
    with posting.worker("threads", 1):
        assert posting.finished(3) == [0, 1, 2]
    first, second = (each for each in posting.book.entries("start") if each.number == 0)
    assert second.monotonic - first.monotonic >= countdown


def test_a_retry_that_waits_is_handed_over_in_its_place(redis_posting: PostingWorkers) -> None:
    with redis_posting.worker() as first:
        redis_posting.leader()
        with redis_posting.worker():
            redis_posting.send("retry", 0, 3.0)
            redis_posting.post(range(1, 5))
            first.wait_for_log("Retry in", DEADLINE_S)
            first.stop(signal.SIGKILL)
            redis_posting.depose()  # no need to wait for the end of its session
            assert redis_posting.finished(5) == list(range(5))
    assert [each.token for each in redis_posting.book.entries("start")][:2] == [1, 2]


def test_leadership_spreads_over_the_workers(
    open_posting: Callable[..., PostingWorkers], election: str
) -> None:
    queues = [f"ledger-{number}" for number in range(4)]
    posting = open_posting(election=election, dq_singleton_queues=queues)

    def leads(workers: int) -> list[int]:
        return sorted(sum(row["leads"] for row in rows) for rows in posting.leaders(workers).values())

    def shared_as(*shares: int) -> None:
        wait_until(
            lambda: leads(len(shares)) == list(shares), DEADLINE_S, what=lambda: str(leads(len(shares)))
        )

    with posting.worker(queues=queues):
        shared_as(4)
        with posting.worker(queues=queues):
            shared_as(2, 2)
        shared_as(4)


def test_a_worker_that_stops_to_consume_hands_over_and_may_volunteer_again(
    redis_posting: PostingWorkers,
) -> None:
    with redis_posting.worker(), redis_posting.worker(queues=["mail"]):
        leader = redis_posting.leader(2)
        redis_posting.post(range(3))
        redis_posting.finished(3)
        redis_posting.app.control.cancel_consumer(QUEUE, destination=[leader], reply=True, timeout=30.0)
        wait_until(lambda: not leads(redis_posting), DEADLINE_S)
        redis_posting.post(range(3, 6))
        redis_posting.app.control.add_consumer(QUEUE, destination=["w2@proof"], reply=True, timeout=30.0)
        assert redis_posting.finished(6) == list(range(6))
        assert redis_posting.leader(2) == "w2@proof"
        redis_posting.app.control.add_consumer(QUEUE, destination=[leader], reply=True, timeout=30.0)
        redis_posting.app.control.cancel_consumer(QUEUE, destination=["w2@proof"], reply=True, timeout=30.0)
        redis_posting.post(range(6, 9))
        assert redis_posting.finished(9) == list(range(9))
    assert redis_posting.overlaps() == 0
    assert sorted({entry.token for entry in redis_posting.book.entries()}) == [1, 2, 3]


def leads(posting: PostingWorkers) -> list[str]:
    """Return those of the two workers that lead the queue."""
    return [
        node
        for node, rows in posting.leaders(2).items()
        if any(row["leads"] and row["queue"] == QUEUE for row in rows)
    ]


def test_a_cancelled_message_holds_up_none_until_it_would_have_been_due(
    redis_posting: PostingWorkers,
) -> None:
    app: Any = redis_posting.app
    with redis_posting.worker("threads", 1):
        cancelled = redis_posting.send("post", 100, 0.0, countdown=3600)
        assert app.dq.queues[QUEUE].cancel(cancelled.id) == "delayed"
        wait_until(lambda: cancelled.state == "REVOKED", DEADLINE_S, what="the record of the cancelled one")
        redis_posting.post(range(3))
        assert redis_posting.finished(3) == [0, 1, 2]


if "worker_pool_start_method" in DEFAULTS:  # since Celery 5.7

    @pytest.mark.logged_error("needs a pool whose processes are forked")
    @pytest.mark.parametrize("broker", ["dq", "stock"])
    def test_a_worker_whose_pool_spawns_its_processes_does_not_start(
        open_posting: Callable[..., PostingWorkers],
        open_plain: Callable[..., PostingWorkers],
        broker: str,
    ) -> None:
        posting = open_posting() if broker == "dq" else open_plain()
        worker = posting.worker(conf={"worker_pool_start_method": "spawn"})
        try:
            assert worker.start().wait(DEADLINE_S) != 0
            assert f"the queue '{QUEUE}' (dq_singleton_queues" in worker.log
            assert "set worker_pool_start_method = 'fork'" in worker.log
        finally:
            worker.discard()
