from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from celery_dq.clock import Clock, ManualClock, SystemClock
from celery_dq.transport.redis.consumer_identity import ServerClock


def test_system_clock_reports_wall_and_monotonic_time() -> None:
    clock: Clock = SystemClock()
    assert abs(clock.wall() - time.time()) < 5
    first = clock.monotonic()
    assert clock.monotonic() >= first


def test_the_monotonic_clock_counts_suspend_where_the_system_can() -> None:
    counts = time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()
    assert abs(SystemClock().monotonic() - counts) < 5


def test_manual_clock_moves_only_when_reported() -> None:
    clock = ManualClock(wall=100.0, monotonic=5.0)
    clock.advance(2.5)
    assert (clock.wall(), clock.monotonic()) == (102.5, 7.5)


def test_a_jump_of_the_wall_clock_leaves_the_monotonic_one() -> None:
    clock = ManualClock(wall=100.0, monotonic=5.0)
    clock.set_wall(40.0)
    assert (clock.wall(), clock.monotonic()) == (40.0, 5.0)


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="would move time back"):
        ManualClock().advance(-1)


def test_the_clock_of_a_server_is_never_ahead_of_it() -> None:
    clock = ManualClock(wall=100.0, monotonic=5.0)

    class SlowServer:
        def time(self) -> tuple[int, int]:
            clock.advance(1.0)
            now = int(clock.wall())
            clock.advance(2.0)
            return now, 500_000

    server: Any = SlowServer()
    server_clock = ServerClock(clock)
    assert server_clock.wall() == 100.0
    server_clock.ask(server)
    assert (server_clock.wall(), clock.wall()) == (101.5, 103.0)
    clock.advance(4.0)
    assert server_clock.wall() == 105.5
