"""The verdict and the plan of the example. Each finding of the verdict has constructed records here."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

KILLED, OTHER = 1, 2


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "example_project"))
    return importlib.import_module("day.judge")


def judged(day: ModuleType, *requests: tuple[int, int, float, int], **kept: set[str]) -> dict[str, object]:
    """Judge one notice of time 100; requests are (attempt, worker, time, status); the kill is at 110."""
    published = [day.Published("n1", 5, "order", 100.0)]
    arrivals = [day.Arrival("n1", *request) for request in requests]
    verdict: dict[str, object] = day.judge(published, arrivals, day.Kill(KILLED, 110.0), **kept).as_dict()
    return {
        name: count
        for name, count in verdict.items()
        if name not in ("published", "missing", "duplicates", "clean", "lost_ids", "held_in_all") and count
    }


def test_each_end_of_a_notice(day: ModuleType) -> None:
    assert judged(day, (1, OTHER, 101, 200)) == {"delivered": 1}
    assert judged(day, (1, OTHER, 101, 500), (2, OTHER, 102, 200)) == {"delivered": 1, "retries": 1}
    refused = [(attempt, OTHER, 100.0 + attempt, 500) for attempt in (1, 2, 3)]
    assert judged(day, *refused) == {"given_up": 1, "retries": 2}
    assert judged(day) == {"lost": 1}
    assert judged(day, held={"n1"}) == {"held": 1}
    assert judged(day, queued={"n1"}) == {"queued": 1}


def test_a_retry_that_never_came_is_a_loss(day: ModuleType) -> None:
    assert judged(day, (1, OTHER, 101, 500), (2, OTHER, 102, 500)) == {"lost": 1, "retries": 1}


def test_a_message_of_the_killed_worker_may_come_twice(day: ModuleType) -> None:
    again = judged(day, (1, KILLED, 109.5, 200), (1, OTHER, 115, 200))
    assert again == {"delivered": 1, "duplicates_by_kill": 1}


def test_a_message_finished_long_before_may_not_come_twice(day: ModuleType) -> None:
    again = judged(day, (1, KILLED, 101, 200), (1, OTHER, 115, 200))
    assert again == {"delivered": 1, "duplicates_unexplained": 1}


def test_the_other_worker_has_no_excuse(day: ModuleType) -> None:
    again = judged(day, (1, OTHER, 109.5, 200), (1, OTHER, 115, 200))
    assert again == {"delivered": 1, "duplicates_unexplained": 1}


def test_an_answer_that_came_too_late_explains_a_retry(day: ModuleType) -> None:
    again = judged(day, (1, OTHER, 101, 200), (2, OTHER, 103, 200))
    assert again == {"delivered": 1, "duplicates_by_timeout": 1}


def test_percentiles_are_values_that_occurred(day: ModuleType) -> None:
    hundred = [float(value) for value in range(1, 101)]
    assert [day.percentile(hundred, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert day.percentile([7.0], 0.5) == 7.0


def test_the_same_seed_is_the_same_day(day: ModuleType) -> None:
    plan = importlib.import_module("day.plan")
    notices = plan.plan(3, 100, 0.1)
    assert notices == plan.plan(3, 100, 0.1)
    assert notices != plan.plan(4, 100, 0.1)
    assert [notice.at for notice in notices] == sorted(notice.at for notice in notices)
    assert [notice for _, batch in plan.batches(notices) for notice in batch] == notices
    assert all(batch[-1].at <= due for due, batch in plan.batches(notices))
    assert {plan.class_of(notice.merchant) for notice in notices} == set(plan.CLASSES)
