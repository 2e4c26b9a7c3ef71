"""How long the callbacks of a channel take."""

from __future__ import annotations

import pytest

from celery_dq.clock import ManualClock
from celery_dq.transport.redis.consuming.channel_claims import MAX_AHEAD, CallbackPace

AHEAD_S = 0.05


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pace(clock: ManualClock) -> CallbackPace:
    return CallbackPace(clock, AHEAD_S)


def run(pace: CallbackPace, clock: ManualClock, *seconds: float) -> None:
    """Run callbacks of these lengths, with a wait after each that does not count."""
    for length in seconds:
        pace.begin(True)
        clock.advance(length)
        pace.end()
        clock.advance(9.0)
        pace.end()


def test_one_message_fits_before_the_first_callback(pace: CallbackPace) -> None:
    assert pace.messages_ahead() == 1


def test_callbacks_in_a_pool_are_not_timed(pace: CallbackPace, clock: ManualClock) -> None:
    pace.begin(False)
    clock.advance(1.0)
    pace.end()
    assert pace.mean_s is None


def test_the_mean_decides_how_many_messages_fit(pace: CallbackPace, clock: ManualClock) -> None:
    run(pace, clock, 0.010)
    assert pace.messages_ahead() == 5
    run(pace, clock, *[1.0] * 20)
    assert pace.messages_ahead() == 1
    run(pace, clock, *[0.0] * 50)
    assert pace.messages_ahead() == MAX_AHEAD
