"""The pace of calls that change many messages."""

from __future__ import annotations

import pytest

from celery_dq.app.api import redis_dead_letters


class FakeTime:
    """A clock that only a call of `sleep` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_stall_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(redis_dead_letters, "time", clock)
    seen = []
    for item in redis_dead_letters.paced(range(8), 4):
        seen.append(clock.now)
        if item == 2:
            clock.sleep(10)
    assert seen == [0, 0.25, 0.5, 10.5, 10.5, 10.75, 11, 11.25]


def test_without_a_rate_there_is_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(redis_dead_letters, "time", clock)
    assert list(redis_dead_letters.paced("abc", None)) == [*"abc"]
    assert clock.now == 0
