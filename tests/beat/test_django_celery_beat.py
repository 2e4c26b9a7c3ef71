"""The elected beat over the scheduler of django-celery-beat, on a real database and a real broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_dq.beat import ElectedScheduler
from celery_dq.testing.waiting import wait_until
from tests.beat.conftest import Beats, lead, once, ticks
from tests.django_project import configure

#: Calls of tick() in which a second message would appear.
PASSES = 8
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The models of django-celery-beat, in a separate database."""
    configure(tmp_path_factory.mktemp("django"))
    from django_celery_beat import models

    return models


@pytest.fixture
def database(models: Any) -> Iterator[Any]:
    """The models, without rows."""
    from django.db import connections

    models.PeriodicTask.objects.all().delete()
    yield models
    connections.close_all()


@pytest.fixture
def conf(conf: dict[str, Any]) -> dict[str, Any]:
    return {
        **conf,
        "beat_schedule": {},
        "dq_beat_scheduler": "django_celery_beat.schedulers:DatabaseScheduler",
        # Without this setting, the scheduler adds an entry for the clean-up of results.
        "result_expires": None,
    }


def now() -> datetime:
    return datetime.now(timezone.utc)


def hourly(models: Any, name: str = "tick", **fields: Any) -> Any:
    every = models.IntervalSchedule.objects.get_or_create(every=1, period="hours")[0]
    return models.PeriodicTask.objects.create(name=name, task=name, interval=every, queue="ticks", **fields)


def clocked(models: Any, time: datetime) -> Any:
    at = models.ClockedSchedule.objects.create(clocked_time=time)
    return models.PeriodicTask.objects.create(
        name="tick", task="tick", clocked=at, one_off=True, queue="ticks"
    )


def passes(beat: ElectedScheduler) -> None:
    """Call tick() of the beat several times."""
    for _ in range(PASSES):
        beat.tick()


def corrections(beat: ElectedScheduler) -> list[Any]:
    """Collect the entries that are due for the wrapped scheduler and that the store refuses."""
    stale: list[Any] = []
    corrected: Any = beat
    correct = beat._correct

    def counted(error: Any) -> None:
        stale.append(error)
        correct(error)

    corrected._correct = counted
    return stale


def close(beat: ElectedScheduler) -> None:
    beat.close()


def die(beat: ElectedScheduler) -> None:
    """End the term only: the wrapped scheduler saves nothing."""
    beat.elector.close(30)


@pytest.mark.parametrize("edited", [False, True])
def test_an_overdue_entry_is_sent_once_after_a_take_over(
    edited: bool, app: Any, database: Any, beats: Beats
) -> None:
    hourly(database, last_run_at=now() - 2 * HOUR)
    hourly(database, "other", last_run_at=now())
    beats.append(ElectedScheduler(app))
    if edited:
        # Another process writes to the schedule after this beat has read it, as each starting beat does.
        database.PeriodicTasks.update_changed()
    lead(beats[0])
    stale = corrections(beats[0])
    passes(beats[0])
    assert len(ticks(app)) == 1
    assert stale == []
    row = database.PeriodicTask.objects.get(name="tick")
    assert row.total_run_count == 1
    assert now() - row.last_run_at < HOUR / 2


@pytest.mark.parametrize("end", [close, die])
@pytest.mark.parametrize("edited", [False, True])
def test_the_next_leader_sends_only_due_entries(
    edited: bool,
    end: Callable[[ElectedScheduler], None],
    app: Any,
    database: Any,
    beats: Beats,
) -> None:
    hourly(database, last_run_at=now() - 2 * HOUR)
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    passes(beats[0])
    end(beats[0])
    if edited:
        database.PeriodicTasks.update_changed()
    lead(beats[1])
    stale = corrections(beats[1])
    passes(beats[1])
    assert len(ticks(app)) == 1
    assert stale == []


@pytest.mark.parametrize("end", [close, die])
def test_a_one_off_runs_under_one_leader_only(
    end: Callable[[ElectedScheduler], None], app: Any, database: Any, beats: Beats
) -> None:
    row = clocked(database, now() - timedelta(seconds=5))
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    # The tick sends the one-off entry; the later tick that would disable its row does not run.
    beats[0].tick()
    assert len(ticks(app)) == 1
    end(beats[0])
    lead(beats[1])
    passes(beats[1])
    assert len(ticks(app)) == 1
    row.refresh_from_db()
    assert not row.enabled


def test_a_one_off_that_is_enabled_again_runs_again(app: Any, database: Any, beats: Beats) -> None:
    row = clocked(database, now() - timedelta(seconds=5))
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    passes(beats[0])
    beats[0].close()
    row.refresh_from_db()
    row.enabled = True
    row.save()
    lead(beats[1])
    passes(beats[1])
    assert len(ticks(app)) == 2
    assert once(app)


def test_an_entry_with_a_start_time_that_was_waited_for_runs_at_it(
    app: Any, database: Any, beats: Beats
) -> None:
    """The time at which a row was read is not a run of the entry."""
    row = hourly(database)
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    passes(beats[0])
    assert ticks(app) == []
    beats[0].close()
    row.refresh_from_db()
    row.last_run_at, row.start_time = None, now() - timedelta(seconds=1)
    row.save()
    lead(beats[1])
    passes(beats[1])
    assert len(ticks(app)) == 1


def test_the_wrapped_scheduler_has_saved_when_the_next_leader_is_elected(
    app: Any, database: Any, beats: Beats
) -> None:
    hourly(database, last_run_at=now() - 2 * HOUR)
    hourly(database, "second", last_run_at=now() - 2 * HOUR)
    beats.append(ElectedScheduler(app))
    lead(beats[0])
    passes(beats[0])
    for row in database.PeriodicTask.objects.all():
        assert row.total_run_count == 1, row.name


def test_a_send_that_fails_is_no_run(app: Any, database: Any, beats: Beats) -> None:
    hourly(database, last_run_at=now() - 2 * HOUR)
    beats.append(ElectedScheduler(app))
    lead(beats[0])
    send, failed = beats[0]._inner.send_task, list[int]()

    def lost(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(1)
            raise ConnectionError("no answer")
        return send(*args, **kwargs)

    beats[0]._inner.send_task = lost
    wait_until(lambda: (beats[0].tick(), ticks(app))[1], 30)
    passes(beats[0])
    assert failed
    assert len(ticks(app)) == 1
    assert database.PeriodicTask.objects.get(name="tick").total_run_count == 1


def test_a_new_row_without_time_zones_is_no_sign_of_a_wrong_clock(
    app: Any, database: Any, beats: Beats, caplog: pytest.LogCaptureFixture
) -> None:
    """Django dates a row in local time, which django-celery-beat reads as UTC until its first run."""
    from django.test import override_settings

    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo", DJANGO_CELERY_BEAT_TZ_AWARE=False):
        hourly(database)
        for _ in range(2):
            beats.append(ElectedScheduler(app))
            lead(beats[-1])
            passes(beats[-1])
            due = beats[-1].schedule["tick"].last_run_at
            assert abs(due - now().replace(tzinfo=None)) < HOUR / 2
            beats[-1].close()
    assert ticks(app) == []
    assert "ahead of the clock" not in caplog.text
