"""Elected beats on a real broker: faults between the sending of a tick and its record."""

from __future__ import annotations

import json
import time
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import schedule

from celery_dq.beat import ElectedScheduler, scheduler
from celery_dq.errors import ConfigurationError, Fenced
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.beat.conftest import EVERY_S, Beats, lead, make_app, once, overdue, settings, tick_until, ticks


def test_one_of_two_ticks(app: Any, beats: Beats) -> None:
    began = time.monotonic()
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    wait_until(lambda: ([beat.tick() for beat in beats], len(ticks(app)) >= 5)[1], interval_s=0.02)
    assert len(ticks(app)) <= (time.monotonic() - began) / EVERY_S + 1
    assert once(app)


def test_each_schedule_has_a_leader(redis_url: str, app: Any, beats: Beats) -> None:
    entry = {"task": "tick", "schedule": EVERY_S, "options": {"queue": "audits"}}
    another = make_app(settings(redis_url, dq_beat_name="audit", beat_schedule={"tick": entry}))
    beats += [ElectedScheduler(app), ElectedScheduler(another)]
    for beat in beats:
        lead(beat)
    tick_until(beats[0], app, 1)
    wait_until(lambda: (beats[1].tick(), len(another.dq.queues["audits"].peek()) >= 1)[1], 30)
    assert ticks(app)[0] != another.dq.queues["audits"].peek()[0].id
    another.close()


def test_the_next_leader_goes_on_where_the_last_one_ended(app: Any, beats: Beats) -> None:
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    tick_until(beats[0], app, 2)
    last = beats[0].schedule["tick"]
    beats[0].close()
    lead(beats[1])
    beats[1].tick()
    assert beats[1].schedule["tick"].last_run_at >= last.last_run_at
    assert beats[1].schedule["tick"].total_run_count >= last.total_run_count == 2
    tick_until(beats[1], app, 4)
    assert once(app)


def test_an_entry_keeps_its_phase_over_a_restart_before_its_first_run(app: Any, beats: Beats) -> None:
    """Celery's plain scheduler counts from its start, so a daily entry never runs if beat restarts often."""
    beats.append(ElectedScheduler(app))
    lead(beats[0])
    beats[0].tick()
    since = beats[0].schedule["tick"].last_run_at
    beats[0].close()
    beats.append(ElectedScheduler(app))
    assert beats[1].schedule["tick"].last_run_at > since
    lead(beats[1])
    beats[1]._take_over(beats[1].elector.term.token)  # type: ignore[union-attr]
    assert beats[1].schedule["tick"].last_run_at == since


def test_a_leader_that_died_between_sending_and_saying_so(app: Any, beats: Beats) -> None:
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    # This beat does not record its ticks any more.
    beats[0]._record = lambda due: None  # type: ignore[method-assign]
    tick_until(beats[0], app, 1)
    beats[0].close()
    lead(beats[1])
    wait_until(lambda: (beats[1].tick(), beats[1].schedule["tick"].total_run_count == 1)[1])
    assert len(ticks(app)) == 1
    tick_until(beats[1], app, 2)
    assert once(app)


@pytest.mark.parametrize("meanwhile", [0, 1, 3])
def test_a_leader_that_is_stopped_before_it_sends(meanwhile: int, app: Any, beats: Beats) -> None:
    """The stopped beat continues after another one has sent that tick, or is about to send it."""
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    old, new = beats
    lead(old)
    send = old._send

    def stopped(*args: Any, **kwargs: Any) -> Any:
        old.elector.close(30)
        lead(new)
        tick_until(new, app, meanwhile)
        return send(*args, **kwargs)

    old._send = stopped
    wait_until(lambda: (old.tick(), old.elector.term is None)[1])
    before = ticks(app)
    assert len(before) == max(meanwhile, 1)
    # A late record of the old leader must not make the new one send the tick again.
    tick_until(new, app, len(before) + 2)
    assert once(app)


def test_an_old_leader_begins_nothing(app: Any, beats: Beats) -> None:
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    old, new = beats
    lead(old)
    tick_until(old, app, 1)
    term, entry = old.elector.term, old.schedule["tick"]
    old.elector.close(30)
    lead(new)
    new.tick()
    # As if the old leader had checked its term just before it was stopped.
    old.elector._term = term
    sent = ticks(app)
    with pytest.raises(Fenced):
        old.apply_async(entry, advance=True)
    assert old.schedule["tick"] is entry
    assert ticks(app) == sent


def test_an_election_that_counts_again_leads_on(app: Any, beats: Beats) -> None:
    """A new or wiped election begins with token 1, and the store knows a higher token."""
    beats.append(ElectedScheduler(app))
    before = beats[0].elector.term
    beats[0].schedule_store.adopt(57, {})
    lead(beats[0])
    term = beats[0].elector.term
    assert (before, term and term.token) == (None, 58)
    tick_until(beats[0], app, 1)


def test_a_broker_that_goes_away_costs_no_tick_and_no_beat(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server:
        app = make_app(settings(server.url(1)))
        beat = ElectedScheduler(app)
        with closing(app), closing(beat):
            lead(beat)
            tick_until(beat, app, 1)
            server.kill()
            overdue(beat)
            # Each of these attempts fails.
            assert [beat.tick() > 0 for _ in range(3)] == [True] * 3
            before = beat.schedule["tick"].total_run_count
            server.restart()
            wait_until(lambda: (beat.tick(), beat.schedule["tick"].total_run_count > before)[1], 60)
            assert once(app)
            begun, over = (each for each in caplog.messages if each.startswith("Beat "))
            assert "gets no answer from its broker or election" in begun
            assert "gets answers again" in over
            assert len([each for each in caplog.messages if each.startswith("The election for")]) <= 1


def test_a_beat_that_starts_before_its_broker() -> None:
    once_only = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    app = make_app(settings("redis://127.0.0.1:1/0", broker_transport_options=once_only))
    beat = ElectedScheduler(app)
    assert beat.tick() == scheduler.RETRY_S
    beat.close()
    app.close()


def test_a_leader_that_hangs_at_the_broker_lets_another_one_try(
    app: Any, beats: Beats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "STUCK_S", 0.3)
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    send = beats[0]._send

    def hangs(*args: Any, **kwargs: Any) -> Any:
        lead(beats[1])
        return send(*args, **kwargs)

    beats[0]._send = hangs
    wait_until(lambda: (beats[0].tick(), len(ticks(app)) > 0)[1])
    # A tick of the other beat may be slow, and no third beat would take over.
    monkeypatch.setattr(scheduler, "STUCK_S", 60.0)
    tick_until(beats[1], app, 3)
    assert once(app)


class Row:
    def __init__(self) -> None:
        self.last_run_at = datetime.now(timezone.utc)
        self.runs = 0


class RowEntry(ScheduleEntry):
    """An entry that is made from a row, as in django-celery-beat, and not from an entry's fields."""

    def __init__(self, row: Row, app: Any) -> None:
        super().__init__(
            "tick", "tick", row.last_run_at, row.runs, schedule(EVERY_S), options={"queue": "ticks"}, app=app
        )
        self.row = row

    def __next__(self, last_run_at: datetime | None = None) -> RowEntry:
        self.row.last_run_at = last_run_at or self.default_now()
        self.row.runs += 1
        return RowEntry(self.row, self.app)

    next = __next__


class RowScheduler(Scheduler):
    def setup_schedule(self) -> None:
        self.schedule["tick"] = RowEntry(Row(), self.app)


@pytest.mark.parametrize("inner", ["celery.beat:PersistentScheduler", "tests.beat.test_beat:RowScheduler"])
def test_wraps_any_scheduler(inner: str, conf: dict[str, Any], beats: Beats, tmp_path: Path) -> None:
    app = make_app({**conf, "dq_beat_scheduler": inner})
    beats += [ElectedScheduler(app, schedule_filename=str(tmp_path / name)) for name in "ab"]
    lead(beats[0])
    tick_until(beats[0], app, 2)
    ran = beats[0].schedule["tick"].last_run_at
    beats[0].close()
    beats[0].close()
    lead(beats[1])
    beats[1].tick()
    assert beats[1].schedule["tick"].last_run_at - ran < timedelta(seconds=5)
    tick_until(beats[1], app, 4)
    assert once(app)
    app.close()


def test_on_another_broker_a_tick_has_the_same_id_each_time(redis_url: str, hosts: str, beats: Beats) -> None:
    conf = {**settings(redis_url), "broker_url": redis_url, "dq_election": f"zookeeper://{hosts}"}
    app = make_app(conf)
    broker = redis.Redis.from_url(redis_url, decode_responses=True)

    def sent() -> list[str]:
        # The newest message is first in the list.
        return [str(json.loads(row)["headers"]["id"]) for row in reversed(broker.lrange("ticks", 0, -1))]

    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    beats[0]._record = lambda due: None  # type: ignore[method-assign]
    wait_until(lambda: (beats[0].tick(), len(sent()) == 1)[1])
    beats[0].close()
    lead(beats[1])
    wait_until(lambda: (beats[1].tick(), len(sent()) == 3)[1])
    assert sent()[0] == sent()[1]
    assert sent()[2] != sent()[1]
    broker.close()
    app.close()


def test_redbeat_is_refused_with_a_remedy(conf: dict[str, Any]) -> None:
    app = make_app({**conf, "dq_beat_scheduler": "redbeat.RedBeatScheduler"})
    with pytest.raises(ConfigurationError, match=r"RedBeat elects a leader .*'celery\.beat:Scheduler"):
        ElectedScheduler(app)
    app.close()
