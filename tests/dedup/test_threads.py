"""``with coordinator.claim(...)``: the threads of one process, each in its own block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from celery_dq.dedup.local import LocalCoordinator
from celery_dq.dedup.machine import CoordinatorLockSnapshot, Verdict
from celery_dq.errors import DedupLockLost
from celery_dq.testing.waiting import wait_until

KEY = "sku:7"
DEADLINE_S = 20.0


@pytest.fixture
def coordinator() -> LocalCoordinator:
    return LocalCoordinator()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def enter(coordinator: LocalCoordinator, call: str, **terms: Any) -> tuple[Verdict, int]:
    """Hold the key for an empty block; return the answer to the call."""
    with coordinator.claim(KEY, call, **terms) as result:
        return result.verdict, result.token


def now(coordinator: LocalCoordinator) -> CoordinatorLockSnapshot:
    found = coordinator.inspect(KEY)
    assert found is not None
    return found


def wait_for_tail(coordinator: LocalCoordinator, call: str) -> None:
    def waits() -> bool:
        tail = now(coordinator).tail
        return tail is not None and tail.call == call

    wait_until(waits, DEADLINE_S, what=f"{call} to wait")


def test_the_tail_waits_for_the_end_of_the_block_and_the_others_are_covered(
    coordinator: LocalCoordinator, threads: ThreadPoolExecutor
) -> None:
    with coordinator.claim(KEY, "a") as result:
        assert result.verdict is Verdict.ACCEPT
        tail: Future[tuple[Verdict, int]] = threads.submit(enter, coordinator, "b")
        wait_for_tail(coordinator, "b")
        assert enter(coordinator, "c") == (Verdict.DECLINE, 0)
        assert not tail.done()
    verdict, token = tail.result(DEADLINE_S)
    assert verdict is Verdict.ACCEPT
    assert token > result.token
    assert coordinator.keys() == []


def wait_for_heir(coordinator: LocalCoordinator, call: str) -> None:
    def waits() -> bool:
        heir = now(coordinator).heir
        return heir is not None and heir.call == call

    wait_until(waits, DEADLINE_S, what=f"{call} to wait")


def test_another_delivery_of_the_task_that_runs_waits_for_the_end_of_the_block(
    coordinator: LocalCoordinator, threads: ThreadPoolExecutor
) -> None:
    with coordinator.claim(KEY, "a", task="t") as result:
        tail = threads.submit(enter, coordinator, "b")
        wait_for_tail(coordinator, "b")
        heir = threads.submit(enter, coordinator, "c", task="t")
        wait_for_heir(coordinator, "c")
        assert not heir.done()
        assert not tail.done()
    verdict, token = heir.result(DEADLINE_S)
    assert verdict is Verdict.ACCEPT
    assert tail.result(DEADLINE_S)[1] > token > result.token
    assert coordinator.keys() == []


def test_a_block_that_raises_gives_its_key_back(coordinator: LocalCoordinator) -> None:
    with pytest.raises(ZeroDivisionError), coordinator.claim(KEY):
        raise ZeroDivisionError
    assert coordinator.keys() == []


def test_a_tail_that_is_replaced_or_freed_does_not_run(
    coordinator: LocalCoordinator, threads: ThreadPoolExecutor
) -> None:
    with coordinator.claim(KEY, "a"):
        replaced = threads.submit(enter, coordinator, "b")
        wait_for_tail(coordinator, "b")
        freed = threads.submit(enter, coordinator, "c", policy="replace")
        with pytest.raises(DedupLockLost, match="the waiting call b was replaced"):
            replaced.result(DEADLINE_S)
        wait_for_tail(coordinator, "c")
        coordinator.free(KEY)
        with pytest.raises(DedupLockLost, match="the waiting call c was replaced, or the key was freed"):
            freed.result(DEADLINE_S)
    assert coordinator.keys() == []


def test_a_tail_begins_when_the_head_is_evicted(coordinator: LocalCoordinator) -> None:
    with coordinator.claim(KEY, "a", timeout=0.05) as head:
        verdict, token = enter(coordinator, "b")
        assert verdict is Verdict.ACCEPT
        assert token > head.token
        assert not coordinator.finish(KEY, "a", head.token)


def test_a_thread_that_is_interrupted_while_it_waits_leaves_its_place(
    coordinator: LocalCoordinator, threads: ThreadPoolExecutor
) -> None:
    waiting = threading.get_ident()

    def interrupt() -> None:
        condition: Any = coordinator._stripe(KEY)
        wait_until(lambda: condition._waiters, DEADLINE_S, what="b to wait")
        signal.pthread_kill(waiting, signal.SIGINT)

    # A process that a shell has started in the background ignores the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with coordinator.claim(KEY, "a"):
            interrupted = threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                enter(coordinator, "b")
            interrupted.result(DEADLINE_S)
            assert now(coordinator).tail is None
    finally:
        signal.signal(signal.SIGINT, handler)
    assert coordinator.keys() == []


@pytest.mark.parametrize("waits", ["before", "after"])
def test_the_key_of_a_thread_that_died_in_its_block_is_free(
    coordinator: LocalCoordinator, threads: ThreadPoolExecutor, waits: str
) -> None:
    """The thread was ended by a library, or has kept the block in a generator that it did not close."""
    left, may_die = [], threading.Event()

    def enter_and_die() -> None:
        left.append(coordinator.claim(KEY, "a"))
        left[0].__enter__()
        may_die.wait(DEADLINE_S)

    dies = threading.Thread(target=enter_and_die)
    dies.start()
    wait_until(lambda: coordinator.keys() == [KEY], DEADLINE_S)
    if waits == "before":
        tail = threads.submit(enter, coordinator, "b")
        wait_for_tail(coordinator, "b")
        may_die.set()
    else:
        may_die.set()
        dies.join(DEADLINE_S)
        tail = threads.submit(enter, coordinator, "b")
    try:
        assert tail.result(DEADLINE_S)[0] is Verdict.ACCEPT
    finally:
        coordinator.free(KEY)
    assert coordinator.keys() == []
