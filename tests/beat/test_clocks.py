"""A dead leader whose clock was ahead delays no entry."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery.schedules import crontab

from celery_dq.beat import ElectedScheduler
from celery_dq.beat.scheduler import CLOCK_DIFFERENCE
from tests.beat.conftest import Beats, lead, make_app, once, tick_until, ticks
from tests.doubles.jumping_clock import JumpingClock


def beat_ahead(app: Any, ahead: timedelta) -> ElectedScheduler:
    """Create a beat on a machine whose clock is ahead."""
    now, clock = app.now, JumpingClock()
    app.now = lambda: now() + ahead
    clock.set_wall_ahead(ahead.total_seconds())
    return ElectedScheduler(app, clock=clock)


def test_an_interval_does_not_wait_for_the_clock_of_a_dead_leader(
    conf: dict[str, Any], app: Any, beats: Beats, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = make_app(conf)
    beats += [beat_ahead(ahead, timedelta(hours=1)), ElectedScheduler(app)]
    lead(beats[0])
    tick_until(beats[0], app, 2)
    assert beats[0].schedule["tick"].last_run_at > datetime.now(timezone.utc) + timedelta(minutes=50)
    beats[0].close()
    lead(beats[1])
    tick_until(beats[1], app, 5)
    assert once(app)
    assert len([each for each in caplog.messages if "was ahead of the clock of this machine" in each]) == 1
    ahead.close()


@pytest.mark.parametrize(("ahead_s", "kept"), [(30, True), (3600, False)])
def test_a_crontab_keeps_a_small_difference_and_is_not_repeated(
    ahead_s: int, kept: bool, conf: dict[str, Any], app: Any, beats: Beats
) -> None:
    # The beats need separate apps, because a schedule takes the time from its app.
    first, second = (
        make_app(
            {
                **conf,
                "beat_schedule": {
                    "tick": {"task": "tick", "schedule": crontab(), "options": {"queue": "ticks"}}
                },
            }
        )
        for _ in range(2)
    )
    beats += [beat_ahead(first, timedelta(seconds=ahead_s)), ElectedScheduler(second)]
    lead(beats[0])
    beats[0].tick()
    entry = beats[0].schedule["tick"]
    entry.last_run_at -= timedelta(minutes=2)
    beats[0]._refill()
    tick_until(beats[0], app, 1)
    ran = beats[0].schedule["tick"].last_run_at
    beats[0].close()
    lead(beats[1])
    began = datetime.now(timezone.utc)
    beats[1].tick()
    adopted = beats[1].schedule["tick"].last_run_at
    assert (adopted == ran) == kept
    assert adopted - began <= CLOCK_DIFFERENCE + timedelta(seconds=20)
    assert len(ticks(app)) == 1
    first.close()
    second.close()


def test_an_interval_counts_from_the_take_over(conf: dict[str, Any], app: Any, beats: Beats) -> None:
    """The entry is not due at once either, because the dead leader sent its tick a moment before."""
    hourly = {"tick": {"task": "tick", "schedule": 3600.0, "options": {"queue": "ticks"}}}
    first, second = (make_app({**conf, "beat_schedule": hourly}) for _ in range(2))
    beats += [beat_ahead(first, timedelta(hours=2)), ElectedScheduler(second)]
    lead(beats[0])
    beats[0].tick()
    beats[0].schedule["tick"].last_run_at -= timedelta(hours=1)
    beats[0]._refill()
    tick_until(beats[0], app, 1)
    beats[0].close()
    lead(beats[1])
    for _ in range(5):
        beats[1].tick()
    assert len(ticks(app)) == 1
    ago = datetime.now(timezone.utc) - beats[1].schedule["tick"].last_run_at
    assert timedelta(0) <= ago < timedelta(minutes=5)
    first.close()
    second.close()
