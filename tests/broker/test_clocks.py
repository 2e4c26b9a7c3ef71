"""Due times follow the clock of Redis, also in a worker whose own clock is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest

from tests.broker.kombu_client import KombuClient
from tests.broker.worker_app import OpenApp


@pytest.mark.parametrize(
    ("task", "buffered"), [("retry_once", False), ("retry_once", True), ("repeat_once", True)]
)
@pytest.mark.parametrize("ahead_s", [600, -600])
def test_a_call_of_a_task_is_due_after_its_countdown(
    open_app: OpenApp, ahead_s: float, task: str, buffered: bool
) -> None:
    settings: dict[str, Any] = {}
    if buffered:
        settings = {"dq_buffer": True, "dq_buffer_folder": "", "dq_buffer_in_workers": True}
    worker_app = open_app(clock_ahead_s=ahead_s, **settings)
    countdown = 0.7
    with worker_app.worker("threads", 1):
        worker_app.send(task, countdown)
        first, second = map(float, worker_app.ran(2, subject="attempt"))
        worker_app.settled()
    assert second - first >= countdown


@pytest.fixture
def far_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_east")
def test_an_eta_without_a_zone_is_utc_in_every_time_zone(kombu_client: KombuClient) -> None:
    kombu_client.publish(1, headers={"eta": "2100-01-01T00:00:00"})
    ((_, due_us),) = kombu_client.client.zrange(kombu_client.keys.delayed, 0, -1, withscores=True)
    assert due_us == datetime(2100, 1, 1, tzinfo=timezone.utc).timestamp() * 1e6
