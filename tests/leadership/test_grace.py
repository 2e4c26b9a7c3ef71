"""Which leader must wait after a predecessor without a hand-over, and which need not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_dq.leadership.elector import ElectionWon
from celery_dq.leadership.runner import Runner
from celery_dq.testing.waiting import wait_until
from tests.leadership.recorded_careers import RecordedCareers

#: The first time is longer than any test; the second one is just long enough to be noticed.
LONG_S, SHORT_S = 60.0, 0.3


def is_asked_to_resign(runner: Runner[str]) -> None:
    runner.resign()


def falls(runner: Runner[str]) -> None:
    term = runner.term
    assert term is not None
    term.fall("as if the session had expired")


def receives_no_answer(runner: Runner[str]) -> None:
    """Let the candidate win another election whose answer is lost."""
    election = runner.elector.election
    accede = election.accept

    def elect(floor: int, since: float) -> ElectionWon:
        election.accept = accede  # type: ignore[method-assign]
        accede(floor, since)
        raise ConnectionError("the answer is lost")

    election.accept = elect  # type: ignore[method-assign]
    runner.resign()


@pytest.mark.parametrize("interrupt", [is_asked_to_resign, falls, receives_no_answer])
def test_a_grace_that_was_interrupted_begins_again(
    interrupt: Callable[[Runner[str]], None], careers: RecordedCareers
) -> None:
    former = careers.elections.candidate()
    wait_until(former.become_candidate)
    former.accept(0, 0.0)
    former.resign(clean=False)
    _, runner = careers.hire("bob", grace_s=LONG_S)
    wait_until(lambda: runner.term)
    runner.elector._grace_s = SHORT_S
    election, elected_at = runner.elector.election, list[float]()
    accede = election.accept

    def elect(floor: int, since: float) -> ElectionWon:
        elected_at.append(time.monotonic())
        return accede(floor, since)

    election.accept = elect  # type: ignore[method-assign]
    interrupt(runner)
    wait_until(lambda: careers.texts())
    assert careers.lines[0][0] - elected_at[-1] >= SHORT_S
    assert careers.texts()[0] == f"bob inaugurates {2 + len(elected_at)}"


def test_a_worker_whose_own_work_has_ended_waits_for_no_grace(careers: RecordedCareers) -> None:
    _, runner = careers.hire("ann", grace_s=LONG_S)
    careers.when("ann inaugurates")
    falls(runner)
    wait_until(lambda: "ann inaugurates 2" in careers.texts())
    assert careers.texts()[:3] == ["ann inaugurates 1", "ann hands over 1", "ann inaugurates 2"]
