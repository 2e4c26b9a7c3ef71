"""Who must wait for a predecessor that said nothing, and who need not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_dq.leadership.election import Accession
from celery_dq.leadership.runner import Runner
from celery_dq.testing.waiting import wait_until
from tests.leadership.hall import Hall

#: So long that no test sees its end, and as short as a wait can be told from none.
LONG_S, SHORT_S = 60.0, 0.3


def is_told_to_resign(runner: Runner[str]) -> None:
    runner.resign()


def falls(runner: Runner[str]) -> None:
    term = runner.term
    assert term is not None
    term.fall("as if the session had expired")


def hears_no_answer(runner: Runner[str]) -> None:
    """It is elected once more without knowing."""
    election = runner.office.election
    accede = election.accede

    def elect(floor: int, since: float) -> Accession:
        election.accede = accede  # type: ignore[method-assign]
        accede(floor, since)
        raise ConnectionError("the answer is lost")

    election.accede = elect  # type: ignore[method-assign]
    runner.resign()


@pytest.mark.parametrize("interrupt", [is_told_to_resign, falls, hears_no_answer])
def test_a_grace_that_was_interrupted_begins_anew(
    interrupt: Callable[[Runner[str]], None], hall: Hall
) -> None:
    former = hall.booth.candidate()
    wait_until(former.stand)
    former.accede(0, 0.0)
    former.resign(clean=False)
    _, runner = hall.hire("bob", grace_s=LONG_S)
    wait_until(lambda: runner.term)
    runner.office._grace_s = SHORT_S
    election, elected_at = runner.office.election, list[float]()
    accede = election.accede

    def elect(floor: int, since: float) -> Accession:
        elected_at.append(time.monotonic())
        return accede(floor, since)

    election.accede = elect  # type: ignore[method-assign]
    interrupt(runner)
    wait_until(lambda: hall.said())
    assert hall.lines[0][0] - elected_at[-1] >= SHORT_S
    assert hall.said()[0] == f"bob inaugurates {2 + len(elected_at)}"


def test_who_knows_that_its_own_work_has_ended_waits_for_nobody(hall: Hall) -> None:
    _, runner = hall.hire("ann", grace_s=LONG_S)
    hall.when("ann inaugurates")
    falls(runner)
    wait_until(lambda: "ann inaugurates 2" in hall.said())
    assert hall.said()[:3] == ["ann inaugurates 1", "ann hands over 1", "ann inaugurates 2"]
