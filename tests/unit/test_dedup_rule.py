from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, shared_task

from celery_dq.dedup import Dedup, dedup
from celery_dq.dedup.rule import override, rule_of
from celery_dq.errors import ConfigurationError
from tests.apps import task


@pytest.fixture
def app() -> Celery:
    return Celery("shop", set_as_current=False)


def test_under_the_task_decorator(app: Celery) -> None:
    @app.task(shared=False, bind=True)
    @dedup(key="{sku}", timeout=60)
    def refresh(self: Any, sku: int) -> None: ...

    assert rule_of(refresh) == Dedup("{sku}", 60)


def test_under_shared_task_and_autoretry(app: Celery) -> None:
    @shared_task(name="tests.dedup.refresh", autoretry_for=(KeyError,))
    @dedup(waiting=0)
    def refresh(sku: int) -> None: ...

    assert rule_of(app.tasks["tests.dedup.refresh"]) == Dedup(waiting=0)


def test_as_an_option_of_the_task(app: Celery) -> None:
    @task(app, dedup={"key": "{sku}", "on_duplicate": "replace"})
    def refresh(sku: int) -> None: ...

    @app.task(shared=False)
    def other(sku: int) -> None: ...

    assert rule_of(refresh) == Dedup("{sku}", on_duplicate="replace")
    assert rule_of(other) is None


def test_above_the_task_decorator_is_an_error(app: Celery) -> None:
    @app.task(shared=False)
    def refresh(sku: int) -> None: ...

    with pytest.raises(ConfigurationError, match="put it below"):
        dedup(key="{sku}")(refresh)


def test_one_call_differs() -> None:
    rule = Dedup("{sku}", 60)
    assert override(rule, None, where="task t") is rule
    assert override(rule, False, where="task t") is None
    assert override(rule, True, where="task t") is rule
    assert override(None, True, where="task t") == Dedup()
    assert override(rule, {"timeout": 5}, where="task t") == Dedup("{sku}", 5)
    assert override(rule, Dedup(), where="task t") == Dedup()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"on_duplicate": "drop"}, "on_duplicate='drop' is none of"),
        ({"waiting": 2}, "waiting=2"),
        ({"timeout": 0}, "timeout=0 is not a number of seconds above 0"),
        ({"timeout": "1m"}, "timeout='1m' is neither"),
        ({"timeout": True}, "timeout=True is neither"),
        ({"keys": "{sku}"}, "task t: dedup has no 'keys'"),
    ],
)
def test_a_wrong_rule_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        override(None, fields, where="task t")


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="task t: dedup=3 is of type int"):
        override(None, 3, where="task t")
    assert Dedup(timeout=timedelta(minutes=1)).seconds == 60
