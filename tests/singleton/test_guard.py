"""The guard, with real processes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from celery_dq.clock import SystemClock
from celery_dq.singleton.guard import LOOK_S, SOON_S, Guard
from celery_dq.testing.waiting import wait_until

CLOCK = SystemClock()


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child process; return its process id."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        try:
            work()
        finally:
            os._exit(0)
    return pid


def fate(pid: int) -> int:
    """Return how the child ended: 0, or minus the signal that killed it."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def toil(seconds: float) -> None:
    """Compute without a blocking call, like the worst task."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10_000))


def make(until_s: float = 60, token: int = 1) -> Guard:
    guard = Guard(["ledger", "mail"])
    guard.trust("ledger", token, CLOCK.monotonic() + until_s)
    return guard


def begin_soon_before_the_end(
    guard: Guard, queue: str = "ledger", token: int = 1, left_s: float = 0.3
) -> None:
    """Start a message in this child `left_s` seconds before trust ends.

    The child computes the time: if the machine is stopped during the fork, trust would end too early.
    """
    guard.trust(queue, token, CLOCK.monotonic() + left_s)
    guard.begin(queue, token)


def stubborn_at_work(guard: Guard, token: int = 1) -> int:
    """Return the process id of a child that runs a long message of the ledger with this token."""

    def work() -> None:
        guard.begin("ledger", token)
        toil(10)

    pid = forked(work)
    wait_until(lambda: guard.runs("ledger"))
    return pid


def test_a_leader_that_is_not_confirmed_any_more_is_killed() -> None:
    guard = make()

    def work() -> None:
        begin_soon_before_the_end(guard)
        toil(10)

    began = time.monotonic()
    assert fate(forked(work)) == -signal.SIGALRM
    assert 0.25 < time.monotonic() - began < 8  # the work itself would end after 10 s


def test_a_leader_that_is_confirmed_in_time_lives() -> None:
    trust_s = 2.5
    guard = make(trust_s)

    def work() -> None:
        guard.begin("ledger", 1)
        toil(trust_s + 0.5)
        guard.end("ledger")

    pid = forked(work)

    def ended_while_it_was_confirmed() -> tuple[int, int] | None:
        guard.trust("ledger", 1, CLOCK.monotonic() + trust_s)
        gone, status = os.waitpid(pid, os.WNOHANG)
        return (gone, status) if gone else None

    ended = wait_until(ended_while_it_was_confirmed, 30, interval_s=0.1)
    assert ended is not None
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_the_end_of_a_message_is_the_end_of_its_alarm() -> None:
    guard = make()

    def work() -> None:
        begin_soon_before_the_end(guard)
        guard.end("ledger")
        toil(0.6)

    assert fate(forked(work)) == 0
    assert not guard.runs("ledger")


def test_a_revoked_term_ends_at_once() -> None:
    guard = make(30)
    pid = stubborn_at_work(guard)
    guard.revoke("ledger", 2)  # the token of another term
    time.sleep(0.2)  # time for an alarm that must not come
    assert guard.runs("ledger")
    began = time.monotonic()
    guard.revoke("ledger", 1)
    assert fate(pid) == -signal.SIGALRM
    assert time.monotonic() - began < 8  # the work itself would end after 10 s
    assert not guard.runs("ledger")


def test_a_message_is_watched_although_the_thread_could_not_start_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = make(30)

    def refuse(*args: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    def work() -> None:
        monkeypatch.setattr("celery_dq.singleton.guard.start_thread", refuse)
        with contextlib.suppress(RuntimeError):
            guard.begin("ledger", 1)
        guard.begin("ledger", 1)
        toil(5)

    pid = forked(work)
    wait_until(lambda: guard.runs("ledger"))
    guard.revoke("ledger", 1)
    assert fate(pid) == -signal.SIGALRM


def test_a_revoked_term_is_not_trusted_again() -> None:
    """A leader that hands over by abort continues to renew its term until its work has ended."""
    guard = make(30)
    pid = stubborn_at_work(guard)
    guard.revoke("ledger", 1)
    guard.trust("ledger", 1, CLOCK.monotonic() + 30)
    began = time.monotonic()
    assert fate(pid) == -signal.SIGALRM
    assert time.monotonic() - began < 8  # the work itself would end after 10 s
    guard.trust("ledger", 2, CLOCK.monotonic() + 30)
    later = stubborn_at_work(guard, 2)
    guard.revoke("ledger", 1)  # too late for any effect
    assert guard.runs("ledger")
    guard.revoke("ledger", 2)
    assert fate(later) == -signal.SIGALRM


def test_a_later_term_does_not_lengthen_the_life_of_an_earlier_one() -> None:
    guard = make(30)
    pid = stubborn_at_work(guard)
    guard.trust("ledger", 2, CLOCK.monotonic() + 30)
    assert fate(pid) == -signal.SIGALRM


def test_a_message_of_an_old_term_does_not_begin() -> None:
    guard = make(30, token=2)
    assert fate(forked(lambda: guard.begin("ledger", 1))) == -signal.SIGKILL
    late = make(0.0)
    assert fate(forked(lambda: late.begin("ledger", 1))) == -signal.SIGKILL


def test_a_stopped_process_dies_when_it_goes_on() -> None:
    guard = make()

    def work() -> None:
        begin_soon_before_the_end(guard, left_s=0.4)
        toil(10)

    pid = forked(work)
    wait_until(lambda: guard.runs("ledger"))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.8)  # duration of the stop
    os.kill(pid, signal.SIGCONT)
    began = time.monotonic()
    assert fate(pid) == -signal.SIGALRM
    assert time.monotonic() - began < 8  # the work itself would end after 10 s


def test_two_queues_have_two_ends() -> None:
    guard = make()

    def work() -> None:
        guard.begin("ledger", 1)
        begin_soon_before_the_end(guard, "mail", 7)
        guard.end("mail")
        toil(0.6)
        guard.end("ledger")

    assert fate(forked(work)) == 0


def test_the_alarm_that_one_message_has_set_moves_with_the_trust_of_the_next() -> None:
    guard = make()

    def work() -> None:
        # So long that the end of the message leaves the alarm set.
        begin_soon_before_the_end(guard, left_s=SOON_S + 0.3)
        guard.end("ledger")
        guard.trust("ledger", 1, CLOCK.monotonic() + 30)
        guard.begin("ledger", 1)
        toil(SOON_S + 0.6)
        guard.end("ledger")

    assert fate(forked(work)) == 0


def test_a_message_behind_one_of_another_queue_has_its_own_end() -> None:
    guard = make()

    def work() -> None:
        guard.begin("ledger", 1)
        guard.end("ledger")
        begin_soon_before_the_end(guard, "mail", 7, left_s=0.5)
        toil(10)

    assert fate(forked(work)) == -signal.SIGALRM


def test_a_message_after_many_others_is_killed_like_the_first() -> None:
    guard = make(30)

    def work() -> None:
        for _ in range(10_000):
            guard.begin("ledger", 1)
            guard.end("ledger")
        guard.begin("ledger", 1)
        toil(60)

    pid = forked(work)
    wait_until(lambda: guard.runs("ledger"))
    guard.revoke("ledger", 1)
    # The child is killed by the alarm, or at the start of the next message.
    assert fate(pid) in (-signal.SIGALRM, -signal.SIGKILL)


def test_a_process_that_a_message_forks_has_no_alarm_of_its_parent_and_may_run_messages_too() -> None:
    guard = make(30)

    def work() -> None:
        guard.begin("ledger", 1)

        def grandchild() -> None:
            begin_soon_before_the_end(guard, "mail", 7, left_s=0.5)
            toil(10)

        assert fate(forked(grandchild)) == -signal.SIGALRM
        guard.end("ledger")
        os._exit(7)

    assert fate(forked(work)) == 7


def test_a_handler_that_a_task_has_left_behind_does_not_outlive_the_next_look() -> None:
    guard = make(30)

    def work() -> None:
        guard.begin("ledger", 1)
        signal.signal(signal.SIGALRM, lambda *_: None)
        watch = guard._watch
        wait_until(lambda: watch is not None and watch.is_foreign, what="the thread to look")
        guard.end("ledger")
        guard.begin("ledger", 1)
        guard.revoke("ledger", 1)
        toil(10)

    assert fate(forked(work)) == -signal.SIGALRM


def test_the_guard_looks_now_and_then_and_not_at_every_message() -> None:
    class Counting(SystemClock):
        asked = 0

        def monotonic(self) -> float:
            self.asked += 1
            return super().monotonic()

    clock = Counting()
    guard = Guard(["ledger"], clock)
    guard.trust("ledger", 1, CLOCK.monotonic() + 60)

    def work() -> None:
        began, before = CLOCK.monotonic(), clock.asked
        for _ in range(300):
            guard.begin("ledger", 1)
            guard.end("ledger")
            # A pool's child waits like this for its next message, and other threads may run.
            select.select([], [], [], 0.001)
        looks = 2 + (CLOCK.monotonic() - began) / LOOK_S
        # The maximum per check: the time to sleep, the time of the alarm, and the message that sets it again.
        os._exit(0 if clock.asked - before <= 5 * looks else 1)

    assert fate(forked(work)) == 0


#: A process without pool processes that ends just after a message, and takes longer for that than its term.
SLOW_END = """
import sys, time
import pytest

from celery_dq.clock import SystemClock
from celery_dq.singleton.guard import Guard

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

sys.slow = Slow()
guard = Guard(["ledger"])
guard.trust("ledger", 1, SystemClock().monotonic() + 0.6)
guard.begin("ledger", 1)
guard.end("ledger")
"""


def test_a_process_that_ends_after_its_message_ends_well() -> None:
    assert subprocess.run([sys.executable, "-c", SLOW_END], timeout=60).returncode == 0
