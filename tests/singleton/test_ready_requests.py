"""Requests that are created before they may start, and how the message before them may end.

A pool with one slot receives messages before the running one has ended. Each test makes sure that some are
waiting, and then ends the running message in an unusual way.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery import Task

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.proxy import Proxy
from tests.singleton.posting_app import QUEUE
from tests.singleton.posting_workers import DEADLINE_S, PostingWorkers
from tests.workers import WorkerProcess

#: Messages before the awaited one; after so many, the worker claims several at a time.
BEFORE, AFTER = 30, 20
ALL = list(range(BEFORE + AFTER))
TIME_LIMIT_S = 3


# The number of claimed messages must not depend on the current speed of the machine.
def one_slot(posting: PostingWorkers, pool: str = "prefork") -> WorkerProcess:
    conf = {"worker_prefetch_multiplier": 16, "dq_claim_ahead": 2, "unconfirmed_s": 2}
    return posting.worker(pool, 1, conf=conf)


def crowd(
    posting: PostingWorkers, worker: WorkerProcess, task: str = "hold", base: int = 0, **options: object
) -> str:
    """Run number `base` + :data:`BEFORE` while requests wait behind it; return its task id."""
    posting.post(range(base, base + BEFORE))
    running = posting.send(task, base + BEFORE, **options)
    posting.post(range(base + BEFORE + 1, base + BEFORE + AFTER))
    posting.wait_started(base + BEFORE)
    wait_until(
        # If a time limit ends the message first, no request is left to wait for.
        lambda: len(reserved(posting, worker)) > 2 or base + BEFORE + 1 in posting.book.numbers("start"),
        DEADLINE_S,
        what="requests behind the one that runs",
    )
    return str(running.id)


def reserved(posting: PostingWorkers, worker: WorkerProcess) -> list[str]:
    """Return the ids of the worker's messages that it has not started."""
    answer = posting.app.control.inspect([worker.name], timeout=10.0).reserved() or {}
    return [row["id"] for rows in answer.values() for row in rows]


def pid_of(posting: PostingWorkers, number: int) -> int:
    return next(entry.pid for entry in posting.book.entries("start") if entry.number == number)


def test_messages_behind_a_child_that_dies_begin_in_the_next_one_and_in_order(
    redis_posting: PostingWorkers,
) -> None:
    """The child is killed, its task is terminated, or its task reaches the hard time limit."""
    everything = list(range(3 * len(ALL)))
    doomed = [round_ * len(ALL) + BEFORE for round_ in range(3)]
    left = [number for number in everything if number not in doomed]
    with one_slot(redis_posting) as worker:
        crowd(redis_posting, worker)
        os.kill(pid_of(redis_posting, doomed[0]), signal.SIGKILL)
        # The message was acknowledged at its start, so it does not run again.
        redis_posting.finished(len(ALL) - 1, DEADLINE_S)
        running = crowd(redis_posting, worker, base=len(ALL))
        redis_posting.app.control.revoke(running, terminate=True, signal="SIGKILL")
        redis_posting.finished(2 * (len(ALL) - 1), DEADLINE_S)
        crowd(redis_posting, worker, base=2 * len(ALL), time_limit=TIME_LIMIT_S)
        assert redis_posting.finished(len(left), DEADLINE_S) == left
    assert redis_posting.book.numbers("start") == everything
    pids = {entry.number: entry.pid for entry in redis_posting.book.entries("start")}
    assert len({pids[number] for number in doomed}) == 3
    assert all(pids[number] != pids[number + 1] for number in doomed)


def test_a_message_from_a_killed_child_goes_before_the_ones_behind_it(
    redis_posting: PostingWorkers,
) -> None:
    with one_slot(redis_posting) as worker:
        crowd(redis_posting, worker, "hold_late")
        os.kill(pid_of(redis_posting, BEFORE), signal.SIGKILL)
        wait_until(lambda: redis_posting.book.numbers("start").count(BEFORE) == 2, DEADLINE_S)
        redis_posting.book.release(str(BEFORE))
        assert redis_posting.finished(len(ALL), DEADLINE_S) == ALL
    assert redis_posting.book.numbers("start") == sorted([*ALL, BEFORE])


if hasattr(Task, "retry_on_worker_lost"):  # since Celery 5.7

    @pytest.mark.parametrize("task", ["hold_retried", "hold_retried_late"])
    def test_a_retry_of_a_killed_child_goes_before_the_messages_behind_it(
        redis_posting: PostingWorkers, task: str
    ) -> None:
        with one_slot(redis_posting) as worker:
            crowd(redis_posting, worker, task)
            os.kill(pid_of(redis_posting, BEFORE), signal.SIGKILL)
            redis_posting.wait_started(BEFORE, 2)
            redis_posting.book.release(str(BEFORE))
            assert redis_posting.finished(len(ALL), DEADLINE_S) == ALL
        assert redis_posting.book.numbers("start") == sorted([*ALL, BEFORE])


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_retry_goes_before_the_messages_behind_one_that_never_runs(
    redis_posting: PostingWorkers, pool: str
) -> None:
    redis_posting.post(range(BEFORE))
    redis_posting.send("hold_and_retry", BEFORE)
    # The message has expired when it is claimed, so it ends before it may start.
    redis_posting.send("post", BEFORE + 1, expires=0.001)
    redis_posting.post(range(BEFORE + 2, BEFORE + AFTER))
    left = [number for number in ALL if number != BEFORE + 1]
    with one_slot(redis_posting, pool):
        redis_posting.wait_started(BEFORE)
        redis_posting.book.release(str(BEFORE), 2)
        assert redis_posting.finished(len(left), DEADLINE_S) == left
    assert redis_posting.book.numbers("start") == sorted([*left, BEFORE])
    assert redis_posting.overlaps() == 1  # a retry ends without an entry in the book


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_revoked_one_is_passed_over(redis_posting: PostingWorkers, pool: str) -> None:
    with one_slot(redis_posting, pool) as worker:
        redis_posting.post(range(BEFORE))
        redis_posting.send("hold", BEFORE)
        doomed = [redis_posting.send("post", number).id for number in range(BEFORE + 1, BEFORE + 4)]
        redis_posting.post(range(BEFORE + 4, BEFORE + AFTER))
        redis_posting.wait_started(BEFORE)
        wait_until(lambda: set(doomed) <= set(reserved(redis_posting, worker)), DEADLINE_S)
        assert redis_posting.app.control.revoke(
            doomed[1:], destination=[worker.name], reply=True, timeout=DEADLINE_S
        )
        redis_posting.book.release(str(BEFORE))
        left = [number for number in ALL if number not in (BEFORE + 2, BEFORE + 3)]
        assert redis_posting.finished(len(left), DEADLINE_S) == left
    assert redis_posting.book.numbers("start") == left


def test_a_term_that_ends_releases_the_messages_behind_a_revoked_one(redis_posting: PostingWorkers) -> None:
    """The pool never has the revoked one."""
    doomed, left = str(uuid.uuid4()), [number for number in range(BEFORE + 3) if number != BEFORE + 1]
    conf: dict[str, Any] = {"worker_prefetch_multiplier": 16, "dq_claim_ahead": 2}
    with redis_posting.worker("prefork", 1, conf=conf) as worker:
        redis_posting.post(range(BEFORE))
        redis_posting.send("hold", BEFORE)
        redis_posting.wait_started(BEFORE)
        # Only the worker is asked: the broker would not deliver the message as one to run.
        revoke: dict[str, Any] = {"task_id": doomed}
        assert redis_posting.app.control.broadcast("revoke", revoke, reply=True, limit=1, timeout=DEADLINE_S)
        os.kill(worker.pid, signal.SIGSTOP)  # so that one claim brings both
        redis_posting.send("post", BEFORE + 1, task_id=doomed)
        last = redis_posting.send("post", BEFORE + 2).id
        os.kill(worker.pid, signal.SIGCONT)
        wait_until(lambda: last in reserved(redis_posting, worker), DEADLINE_S)
        redis_posting.app.control.broadcast("resign", {"queue": QUEUE}, destination=[worker.name])
        wait_until(
            lambda: {row["phase"] for row in redis_posting.leaders(1)[worker.name]} == {"handing over"}
        )
        redis_posting.book.release(str(BEFORE))
        assert redis_posting.finished(len(left), 30) == left
    assert redis_posting.book.numbers("start") == left
    assert redis_posting.book.entries("finish")[-1].token == 2


def test_an_abort_releases_the_messages_behind(open_posting: Callable[..., PostingWorkers]) -> None:
    posting = open_posting(dq_singleton_queues={QUEUE: {"hand_over": "abort"}})
    with one_slot(posting) as first:
        crowd(posting, first, "hold_late")
        with one_slot(posting):
            posting.app.control.broadcast("resign", {"queue": QUEUE}, destination=[first.name])
            wait_until(lambda: posting.book.numbers("start").count(BEFORE) == 2, DEADLINE_S)
            posting.book.release(str(BEFORE))
            assert posting.finished(len(ALL), DEADLINE_S) == ALL
    assert posting.book.numbers("start") == sorted([*ALL, BEFORE])
    assert {entry.token for entry in posting.book.entries("start") if entry.number > BEFORE} == {2}


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_stops_releases_the_messages_behind(redis_posting: PostingWorkers, pool: str) -> None:
    with one_slot(redis_posting, pool) as first:
        crowd(redis_posting, first)
        with one_slot(redis_posting, pool):
            os.kill(first.pid, signal.SIGTERM)
            first.wait_for_log("Warm shutdown", DEADLINE_S)
            redis_posting.book.release(str(BEFORE))
            assert redis_posting.finished(len(ALL), DEADLINE_S) == ALL
            assert first.wait(DEADLINE_S) == 0
            log = first.log
    assert redis_posting.book.numbers("start") == ALL
    assert redis_posting.book.entries("finish")[-1].token == 2
    assert redis_posting.overlaps() == 0
    assert "was not handed over within" not in log


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_lost_connection_releases_the_messages_behind(
    redis_posting: PostingWorkers, redis_server: RedisServer, pool: str
) -> None:
    with Proxy(redis_server.port) as proxy:
        redis_posting.conf["broker_url"] = proxy.url(redis_posting.conf["broker_url"])
        with one_slot(redis_posting, pool) as worker:
            crowd(redis_posting, worker)
            proxy.cut_all()
            worker.wait_for_log("Connection to broker lost", DEADLINE_S)
            redis_posting.book.release(str(BEFORE))
            assert redis_posting.finished(len(ALL), DEADLINE_S) == ALL
    assert redis_posting.book.numbers("start") == ALL
    assert redis_posting.overlaps() == 0


def claims(posting: PostingWorkers) -> int:
    """Return the number of claims that returned messages."""
    with posting.app.connection_for_write() as connection:
        channel: Any = connection.default_channel
        return int(channel.client.hget(channel.partition(QUEUE).keys.state, "claim") or 0)


def wait_more(count: Callable[[], int], before: int) -> None:
    wait_until(lambda: count() > before, DEADLINE_S, what=f"more than {before}")


@pytest.mark.parametrize("slots", [1, 4])
def test_a_message_returned_by_a_lost_connection_goes_before_later_claims(
    redis_posting: PostingWorkers, redis_server: RedisServer, slots: int
) -> None:
    """A retry, and the message of a killed child: both have started before the connection was lost."""
    conf = {"worker_prefetch_multiplier": 16, "dq_claim_ahead": 2}
    with Proxy(redis_server.port) as proxy:
        redis_posting.conf["broker_url"] = proxy.url(redis_posting.conf["broker_url"])
        with redis_posting.worker("prefork", slots, conf=conf) as worker:
            redis_posting.post(range(2))  # from these, the worker learns how many to claim ahead
            for turn, task in enumerate(["hold_and_retry", "hold_late"]):
                first = 2 + 3 * turn
                redis_posting.send(task, first)
                redis_posting.wait_started(first)
                before = claims(redis_posting)
                connected = worker.log.count("Connected to")
                proxy.cut_all()
                worker.wait_for_log("Connected to", DEADLINE_S, occurrences=connected + 1)
                redis_posting.post(range(first + 1, first + 3))
                wait_more(partial(claims, redis_posting), before)
                if task == "hold_late":
                    os.kill(pid_of(redis_posting, first), signal.SIGKILL)
                else:
                    redis_posting.book.release(str(first))
                # The next message to start is the returned one, which blocks again.
                wait_more(lambda: len(redis_posting.book.numbers("start")), first + turn + 1)
                redis_posting.book.release(str(first))
                redis_posting.finished(first + 3, DEADLINE_S)
    assert redis_posting.book.numbers("start") == [0, 1, 2, 2, 3, 4, 5, 5, 6, 7]
