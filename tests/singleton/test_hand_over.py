"""Changes of leadership: by abort, one worker after the other, and in a pool with a sleeping loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from celery_dq.testing.waiting import wait_until
from tests.singleton.posting_app import QUEUE
from tests.singleton.posting_workers import DEADLINE_S, SESSION_S, PostingWorkers


def resign(posting: PostingWorkers, worker: str) -> None:
    posting.app.control.broadcast("resign", {"queue": QUEUE}, destination=[worker], reply=True, timeout=30.0)


@pytest.mark.parametrize("hired", [2, 1])
def test_abort_kills_the_running_message_and_it_runs_again(
    hired: int, open_posting: Callable[..., PostingWorkers]
) -> None:
    """The message runs again on another worker, or after a fall in the next term of a lone worker."""
    posting = open_posting(dq_singleton_queues={QUEUE: {"hand_over": "abort"}}, without_rounds=True)
    with ExitStack() as stack:
        for _ in range(hired):
            stack.enter_context(posting.worker())
        leader = posting.leader(hired)
        posting.post(range(2))
        posting.finished(2)
        posting.post(range(2, 3), task="spin_once", seconds=60)
        posting.wait_started(2)
        posting.post(range(3, 6))
        if hired > 1:
            resign(posting, leader)
        else:
            posting.depose()
        assert posting.finished(6) == list(range(6))
    starts = [(entry.number, entry.token) for entry in posting.book.entries("start")]
    assert starts == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (5, 2)]


def test_a_rolling_restart_loses_and_reorders_nothing_and_runs_nothing_twice(
    redis_posting: PostingWorkers,
) -> None:
    sent = 0
    workers = [redis_posting.worker() for _ in range(2)]
    try:
        for worker in workers:
            worker.start().wait_ready()
        redis_posting.leader(2)
        for _ in range(3):
            redis_posting.post(range(sent, sent + 40), seconds=0.02)
            sent += 40
            redis_posting.wait_started(sent - 30)
            workers.append(redis_posting.worker().start())
            workers[-1].wait_ready()
            workers[0].stop(deadline=DEADLINE_S)
            workers.pop(0).discard()
        assert redis_posting.finished(sent) == list(range(sent))
    finally:
        for worker in workers:
            worker.discard()
    assert redis_posting.book.numbers("start") == list(range(sent))
    assert redis_posting.overlaps() == 0
    assert len({entry.token for entry in redis_posting.book.entries()}) >= 2


@pytest.mark.parametrize("stops", [False, True], ids=["resigns", "stops"])
def test_gevent_hands_over_within_its_two_seconds_and_a_half(
    redis_posting: PostingWorkers, stops: bool
) -> None:
    conf = {"dq_lease": 3 * SESSION_S}
    with redis_posting.worker("gevent", conf=conf) as one, redis_posting.worker("gevent", conf=conf) as two:
        leader = redis_posting.leader(2)
        redis_posting.post(range(60), seconds=0.02)
        redis_posting.wait_started(10)
        if stops:
            (one if one.name == leader else two).stop(deadline=DEADLINE_S)
        else:
            resign(redis_posting, leader)
        # Even after a late change of leadership, messages are left for the other worker.
        redis_posting.post(range(60, 70))
        assert redis_posting.finished(70) == list(range(70))
    starts, finishes = redis_posting.book.entries("start"), redis_posting.book.entries("finish")
    first = next(number for number, entry in enumerate(starts) if entry.token == 2)
    assert starts[first].monotonic - finishes[first - 1].monotonic < 2.5
    assert redis_posting.overlaps() == 0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_an_ordinary_stop_of_a_leader_logs_no_warning(posting: PostingWorkers, pool: str) -> None:
    with posting.worker(pool, 1) as leader, posting.worker(pool, 1) as successor:
        if posting.leader(2) != leader.name:
            leader, successor = successor, leader
        posting.send("hold", 0)
        posting.wait_started(0)
        os.kill(leader.pid, signal.SIGTERM)  # with a running message
        leader.wait_for_log("Warm shutdown")
        posting.book.release("0")
        assert leader.wait() == 0
        posting.post(range(1, 3))
        assert posting.finished(3) == [0, 1, 2]
        assert successor.stop() == 0  # without one
        logs = [each.log.partition(" ready.")[2] for each in (leader, successor)]
    levels = ("WARNING/", "ERROR/", "CRITICAL/")
    lines = [line for log in logs for line in log.splitlines()]
    assert "Warm shutdown" in logs[0]
    assert "Warm shutdown" in logs[1]
    assert [line for line in lines if any(level in line for level in levels)] == []


@pytest.mark.parametrize(
    ("election", "broker", "how"),
    [
        ("redis", "dq", "remote"),
        ("zookeeper", "dq", "soft"),
        ("redis", "stock", "remote"),
        ("redis", "stock", "soft"),
    ],
    indirect=["election"],
)
def test_a_leader_that_stops_without_a_signals_flag_hands_over_during_a_task_of_another_queue(
    open_posting: Callable[..., PostingWorkers],
    open_plain: Callable[..., PostingWorkers],
    election: str,
    broker: str,
    how: str,
) -> None:
    # Any other way than a hand-over to let another worker lead would take as long as the lease.
    conf = {"dq_lease": 3 * SESSION_S, "worker_soft_shutdown_timeout": 3 * SESSION_S}
    posting = open_posting(election=election, **conf) if broker == "dq" else open_plain(**conf)
    with posting.worker(queues=[QUEUE, "mail"]) as leader:
        posting.send("hold", 100, queue="mail")
        posting.wait_started(100)
        assert posting.leader() == leader.name
        with posting.worker():
            if how == "remote":
                posting.app.control.shutdown(destination=[leader.name])
                leader.wait_for_log("Got shutdown from remote")
            else:
                os.kill(leader.pid, signal.SIGQUIT)
                leader.wait_for_log("Initiating Soft Shutdown")
            posted = posting.post(range(3))
            assert posting.finished(3, 2 * SESSION_S) == posted
            if how == "remote":
                posting.book.release("100")
                assert leader.wait() == 0
            else:
                leader.stop(signal.SIGKILL)


def test_a_candidate_with_a_new_child_that_is_elected_loses_no_connection(
    open_posting: Callable[..., PostingWorkers],
) -> None:
    """The new child has inherited the connections that the worker closes when it begins to consume."""
    posting = open_posting(broker_transport_options={"socket_timeout": 2.0})
    with posting.worker("prefork", 1) as leader, posting.worker("prefork", 1) as successor:
        if posting.leader(2) != leader.name:
            leader, successor = successor, leader
        children = set(successor.children())
        for child in children:
            child.kill()
        wait_until(lambda: set(successor.children()) - children, DEADLINE_S)
        assert leader.stop() == 0
        posting.post(range(2))
        assert posting.finished(2) == [0, 1]
        assert {entry.worker for entry in posting.book.entries("start")} == {successor.name}
        assert "connection to broker lost" not in successor.log.lower()
