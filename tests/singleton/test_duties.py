"""The work of the leader of a queue in its term, in the right order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_dq.keys import PartitionKeys
from celery_dq.leadership.career import Career
from celery_dq.leadership.redis_election import RedisElection, RedisLines
from celery_dq.options.sections import SingletonOptions
from celery_dq.singleton.guard import Guard
from celery_dq.singleton.leaderships import WorkerLeaderships
from celery_dq.testing.waiting import wait_until
from tests.singleton.test_guard import fate, forked, toil

QUEUE = "ledger"
SESSION_S = 30.0


class Diary(Career[Any]):
    """A career and a consumer that record their calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.may_begin = threading.Event()
        self.holds = False

    def inaugurate(self, token: int) -> None:
        self.lines.append("inaugurates")
        self.may_begin.wait(60)

    def hand_over(self) -> None:
        self.lines.append("handed over")

    def is_busy(self, queue: str, token: int) -> bool:
        self.lines.append("busy" if self.holds else "at rest")
        return self.holds

    def is_cut_off(self, queue: str, token: int) -> bool:
        return False


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def guard() -> Guard:
    return Guard([QUEUE])


@pytest.fixture
def leaderships(redis_url: str, diary: Diary, guard: Guard) -> Iterator[WorkerLeaderships]:
    with redis.Redis.from_url(redis_url, socket_timeout=20) as client:
        leaderships = WorkerLeaderships(
            {QUEUE: SingletonOptions(QUEUE)},
            lambda queue: RedisElection(client, PartitionKeys("online", queue), "w", SESSION_S),
            None,
            guard,
            careers={QUEUE: diary},
            kills=False,
            lines=RedisLines(client, lambda queue: PartitionKeys("online", queue), SESSION_S),
        )
        leaderships.attach_consumer(QUEUE, diary)
        yield leaderships
        diary.holds = False
        diary.may_begin.set()
        assert leaderships.close(30)


def leads(leaderships: WorkerLeaderships) -> int:
    return wait_until(lambda: leaderships.term_token(QUEUE), 30)


def test_nothing_is_consumed_before_the_inauguration_is_over(
    leaderships: WorkerLeaderships, diary: Diary
) -> None:
    leaderships.volunteer(QUEUE)
    wait_until(lambda: diary.lines == ["inaugurates"], 30)
    assert leaderships.report()[0].leads
    assert leaderships.term_token(QUEUE) == 0
    diary.may_begin.set()
    assert leads(leaderships) == 1


def test_the_last_message_has_ended_before_the_hand_over(
    leaderships: WorkerLeaderships, diary: Diary
) -> None:
    diary.may_begin.set()
    diary.holds = True
    leaderships.volunteer(QUEUE)
    leads(leaderships)
    leaderships.withdraw(QUEUE)
    wait_until(lambda: diary.lines.count("busy") > 2, 30)
    diary.holds = False
    wait_until(lambda: "handed over" in diary.lines, 30)
    assert diary.lines == ["inaugurates", *["busy"] * diary.lines.count("busy"), "at rest", "handed over"]


def test_a_term_that_falls_lasts_until_the_process_that_runs_its_message_is_dead(
    leaderships: WorkerLeaderships, diary: Diary, guard: Guard
) -> None:
    tokens, sends = os.pipe()

    def work() -> None:
        guard.begin(QUEUE, int(os.read(tokens, 20)))
        toil(30)

    pid = forked(work)
    diary.may_begin.set()
    diary.holds = True
    leaderships.volunteer(QUEUE)
    token = leads(leaderships)
    os.write(sends, str(token).encode())
    wait_until(lambda: guard.runs(QUEUE), 30)
    # While it is stopped, the process does not react to the signal that kills it.
    os.kill(pid, signal.SIGSTOP)
    leaderships.report_fenced(QUEUE, token)
    wait_until(lambda: diary.lines.count("busy") > 2 or "handed over" in diary.lines, 30)
    assert "handed over" not in diary.lines
    os.kill(pid, signal.SIGCONT)
    assert fate(pid) == -signal.SIGALRM
    # The remaining messages need only acknowledgements, which do not delay the hand-over.
    wait_until(lambda: "handed over" in diary.lines, 30)
    for end in (tokens, sends):
        os.close(end)
