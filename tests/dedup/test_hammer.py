"""A short load test; ``python -m tests.dedup.hammer --calls 1000000 --kills 200`` is the long one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dedup.hammer import Plan, hammer
from tests.dedup.hammer_judge import Event, Verdict, judge

SECOND = 1_000_000


@pytest.mark.parametrize("timeout_us", [0, 1_000])
def test_hammering_with_killed_workers(timeout_us: int) -> None:
    plan = Plan(7, calls=1_200, keys=20, pushers=1, workers=2, threads=4, kills=1, timeout_us=timeout_us)
    verdict = hammer(plan)
    assert verdict.wrong == []
    assert verdict.counts["broker accept"] >= verdict.counts["accepted"] > 0
    assert sum(verdict.counts[what] for what in ("accepted", "blocked", "declined")) == 1_200
    assert verdict.counts["declined"] > 100
    assert verdict.forced["an eviction"] <= verdict.counts["broker evict"]


class Story:
    """Builds a journal with one event per second."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, what: str, call: str, **more: Any) -> Story:
        number = len(self.events)
        self.events.append(Event(number, number * SECOND, what, "k", call, more))
        return self

    def start(self, call: str, claim: int, worker: str = "w1", asked: int | None = None) -> Story:
        asked = len(self.events) if asked is None else asked
        return self.record(
            "start", call, claim=claim, worker=worker, asked=asked, asked_at=asked * SECOND - SECOND // 2
        )

    def end(self, call: str, claim: int, worker: str = "w1") -> Story:
        return self.record("end", call, claim=claim, worker=worker)

    def verdict(self, what: str, call: str, covering: str, made: int) -> Story:
        return self.record(what, call, covering=covering, replaced="", made=made)

    def renewed(self, worker: str = "w1") -> Story:
        return self.record("renewed", worker, sent=len(self.events) * SECOND)

    def judged(self, timeout_us: int = 0) -> Verdict:
        return judge(self.events, lease_us=2 * SECOND, timeout_us=timeout_us)


def test_the_judge_sees_two_running() -> None:
    wrong = Story().start("a", 1).start("b", 2, "w2").judged().wrong
    assert "b starts on k while a runs" in wrong[0]
    assert Story().start("a", 1).end("a", 1).start("b", 2).judged().wrong == []


def test_the_judge_sees_a_token_that_does_not_grow() -> None:
    wrong = Story().start("a", 2).end("a", 2).start("b", 1).judged().wrong
    assert "b has token 1 on k, which had 2" in wrong[0]


def test_an_eviction_forces_an_overlap_after_its_timeout_only() -> None:
    story = Story().start("a", 1).start("b", 2, "w2")
    assert story.judged(timeout_us=SECOND).forced == {"an eviction": 1}
    assert story.judged(timeout_us=3 * SECOND).wrong != []
    # The start of the evicted run may be written last.
    story = Story().start("b", 2, "w2").start("a", 1, asked=0).end("a", 1).start("c", 3)
    assert story.judged(timeout_us=SECOND).forced == {"an eviction": 2}


def test_a_kill_forces_an_overlap() -> None:
    story = Story().start("a", 1).record("dying", "w1").start("b", 2, "w2").record("dead", "w1")
    assert story.judged().forced == {"a kill": 1}


def test_a_lost_lease_forces_an_overlap_only_where_it_shows() -> None:
    # The worker got the answer "stale", or was silent for longer than its lease.
    reported = Story().start("a", 1).start("b", 2, "w2").record("stale", "a", claim=1, worker="w1")
    assert (reported.judged().wrong, reported.judged().forced) == ([], {"a lost lease": 1})
    silent = Story().renewed().start("a", 1).record("x", "x").start("b", 2, "w2").renewed()
    assert (silent.judged().wrong, silent.judged().forced) == ([], {"a lost lease": 1})
    there = Story().renewed().start("a", 1).renewed().start("b", 2, "w2").renewed()
    assert "b starts on k while a runs" in there.judged().wrong[0]


def test_a_run_that_reports_of_its_start_after_its_lease_was_lost_counts_for_nothing() -> None:
    # Its worker was stopped between the claim and the start, while others had the message.
    story = Story().renewed().record("x", "x").start("a", 2, "w2").start("a", 1, asked=0).renewed()
    assert (story.judged().wrong, story.judged().forced) == ([], {"a lost lease": 1})


def test_the_judge_sees_a_lost_update() -> None:
    wrong = Story().start("a", 1).record("x", "x").verdict("declined", "c", "a", made=1).judged().wrong
    assert "c, made at 1, is covered by a" in wrong[0]
    later = Story().record("x", "x").verdict("declined", "c", "a", made=1).start("a", 1)
    assert later.judged().wrong == []


def test_the_judge_sees_two_waiting() -> None:
    story = Story().record("x", "x").verdict("blocked", "a", "h", 0).verdict("blocked", "b", "h", 0)
    story.start("a", 1).end("a", 1).start("b", 2)
    assert "b waits on k while a does" in story.judged().wrong[0]
    # Another worker had claimed it, and lost its lease without a report: it did not wait all the time.
    story = Story().renewed("w3").verdict("blocked", "a", "h", 0).verdict("blocked", "b", "h", 0)
    story.start("a", 1).end("a", 1).start("b", 2).renewed("w3")
    assert story.judged().wrong == []
