from __future__ import annotations

import sys
import time

import pytest

from celery_dq.clock import Clock, ManualClock, SystemClock


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
