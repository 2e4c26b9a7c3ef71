"""A short hammering; ``python -m tests.dedup.hammer --calls 1000000`` is the long one."""

from __future__ import annotations

import pytest

from tests.dedup.hammer import Event, Plan, hammer, judge


@pytest.mark.parametrize("timeout_us", [0, 1_000])
def test_hammering_with_killed_workers(timeout_us: int) -> None:
    plan = Plan(seed=7, calls=1_200, keys=20, workers=2, threads=4, kills=1, timeout_us=timeout_us)
    verdict = hammer(plan)
    assert verdict.wrong == []
    assert verdict.counts["call"] == 1_200
    assert verdict.counts["declined"] > 100
    assert verdict.overlaps <= verdict.counts["broker evict"]


def started(number: int, call: str, claim: int, worker: str = "w1") -> Event:
    return number, "start", "k", call, {"claim": claim, "worker": worker, "asked": number}


def told(number: int, what: str, call: str, covering: str, made: int) -> Event:
    return number, what, "k", call, {"covering": covering, "replaced": "", "made": made}


def test_the_judge_sees_what_is_wrong() -> None:
    two_running = [started(1, "a", 1), started(2, "b", 2)]
    assert "b starts on k while a runs" in judge(two_running, evictions=False).wrong[0]
    assert judge(two_running, evictions=True).overlaps == 1
    killed: Event = (2, "kill", "", "w1", {})
    assert judge([started(1, "a", 2), killed, started(3, "b", 3)], evictions=False).wrong == []
    lost = [started(0, "a", 1), told(2, "declined", "c", "a", 1)]
    assert "c, made at 1, is covered by a" in judge(lost, evictions=False).wrong[0]
    waiting = [told(1, "blocked", "a", "h", 0), told(2, "blocked", "b", "h", 0)]
    waiting += [started(3, "a", 1), (4, "end", "k", "a", {}), started(5, "b", 2)]
    assert "b waits on k while a does" in judge(waiting, evictions=False).wrong[0]
