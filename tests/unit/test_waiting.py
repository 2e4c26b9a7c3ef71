from __future__ import annotations

import pytest

from celery_dq.testing.waiting import wait_until


def test_the_result_is_the_value_that_became_true() -> None:
    seen = iter([0, "", "there"])
    assert wait_until(lambda: next(seen), 5, interval_s=0.001) == "there"


def test_the_error_reports_the_condition_and_the_present_state() -> None:
    with pytest.raises(TimeoutError, match=r"not within 0\.01 s: 3 tasks, have 2"):
        wait_until(lambda: False, 0.01, what=lambda: "3 tasks, have 2")


def test_the_condition_is_looked_at_once_without_any_time() -> None:
    assert wait_until(lambda: True, 0)
