"""When a worker knows that it is to stop."""

from __future__ import annotations

from typing import Any

import pytest
from celery.worker import state

from celery_dq.hooks import WIRES
from tests.brokers import DQ
from tests.workers import make_app


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
    monkeypatch: pytest.MonkeyPatch, redis_url: str, flag: str, value: Any, closing: bool
) -> None:
    app = make_app("closing", DQ, {"broker_url": redis_url.replace("redis://", "dq-redis://")})
    consumer = app.WorkController(app=app, pool_cls="solo", concurrency=1).consumer
    monkeypatch.setattr(state, flag, value)
    assert consumer.conninfo.transport_options[WIRES].gate.closing is closing
    app.close()
