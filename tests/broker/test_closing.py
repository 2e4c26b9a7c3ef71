"""When a worker knows that it is to stop."""

from __future__ import annotations

from typing import Any

import pytest
from celery.worker import state

from celery_dq.worker.gate import Gate


@pytest.mark.parametrize(
    ("flag", "value", "closing"),
    [
        ("should_stop", None, False),
        ("should_stop", False, False),
        # what Celery's handler of SIGTERM leaves: the exit code
        ("should_stop", 0, True),
        ("should_stop", True, True),
        ("should_terminate", 0, True),
    ],
)
def test_a_worker_closes_with_whatever_celery_leaves(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: Any, closing: bool
) -> None:
    monkeypatch.setattr(state, flag, value)
    # It looks at Celery's flags only, and a worker made here would change this whole process.
    assert object.__new__(Gate).closing is closing
