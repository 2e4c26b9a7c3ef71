"""An entry that cannot be sent, or that is gone, does no harm to the other entries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis

from celery_dq.beat import ElectedScheduler, scheduler
from celery_dq.beat.schedule_store import LastRun
from celery_dq.testing.waiting import wait_until
from celery_dq.znodes import BeatNodes
from celery_dq.zookeeper.session import Session
from tests.beat.conftest import EVERY_S, Beats, lead, make_app, once, settings, tick_until

#: The keys of the user `beat`: not those of the queue `denied`.
ALLOWED = ("dq:{online/ticks/0}:*", "dq:{online/celery*", "dq:online:*", "_kombu*")


def entry(queue: str, schedule: float = EVERY_S) -> dict[str, Any]:
    return {"task": "tick", "schedule": schedule, "options": {"queue": queue}}


@pytest.fixture
def server(redis_url: str) -> Iterator[Any]:
    client = redis.Redis.from_url(redis_url, decode_responses=True)
    client.acl_setuser("beat", enabled=True, passwords=["+pw"], commands=["+@all"], keys=list(ALLOWED))
    yield client
    client.acl_deluser("beat")
    client.close()


@pytest.fixture(params=["redis", "zookeeper"])
def state(request: pytest.FixtureRequest, redis_url: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """The settings of an app whose schedule store is of this kind, and a view of the stored entries."""
    if request.param == "redis":
        client: Any = redis.Redis.from_url(redis_url, decode_responses=True)
        key = "dq:online:beat:beating"
        yield settings(redis_url), lambda: {name[2:] for name in client.hkeys(key) if name.startswith("e:")}
        client.close()
        return
    session = Session(request.getfixturevalue("hosts"), timeout_s=8)
    conf = {"broker_url": redis_url, "dq_election": f"zookeeper://{session.hosts}"}
    folder = BeatNodes("online", "beating").path
    yield (
        {**settings(redis_url), **conf},
        lambda: set(session.ask(lambda client: client.get_children_async(folder), 8)),
    )
    session.close()


@pytest.mark.parametrize("stuck", [False, True])
def test_an_entry_whose_queue_refuses_it_starves_no_other_entry(
    stuck: bool, server: Any, redis_url: str, beats: Beats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "LONGEST_PAUSE_S", 1.0)
    allowed = redis_url.replace("redis://", "redis://beat:pw@")
    # The other entry is always due, too, and comes after the refused one.
    schedule = {"denied": entry("denied", 0.001), "tick": entry("ticks", 0.001)}
    app = make_app(settings(allowed, beat_schedule=schedule))
    beats.append(ElectedScheduler(app))
    beats[0].schedule = dict(sorted(beats[0].schedule.items()))
    if stuck:
        # Each attempt takes so long that the beat resigns.
        monkeypatch.setattr(scheduler, "STUCK_S", 0.2)
        send = beats[0]._inner.send_task

        def slow(*args: Any, **kwargs: Any) -> Any:
            if kwargs["queue"] == "denied":
                wait_until(lambda: beats[0].elector.term is None, 30)
            return send(*args, **kwargs)

        beats[0]._inner.send_task = slow
    lead(beats[0])
    began = time.monotonic()
    tick_until(beats[0], app, 3)
    assert time.monotonic() - began < 25
    assert once(app)
    # The refused tick is sent as soon as its queue takes it.
    server.acl_setuser("beat", enabled=True, passwords=["+pw"], commands=["+@all"], keys=["*"])
    other = make_app(settings(redis_url))
    wait_until(lambda: (beats[0].tick(), other.dq.queues["denied"].peek())[1], 30)
    other.close()
    app.close()


def test_an_entry_whose_record_is_unreadable_starts_again(redis_url: str, beats: Beats, app: Any) -> None:
    client = redis.Redis.from_url(redis_url)
    client.hset("dq:online:beat:beating", "e:tick", "nonsense")
    beats.append(ElectedScheduler(app))
    lead(beats[0])
    tick_until(beats[0], app, 1)
    client.hset("dq:online:beat:beating", "e:tick", "nonsense")
    tick_until(beats[0], app, 3)
    assert once(app)
    # If the entry is deleted now, the marker of its last tick goes by itself.
    assert 0 < client.ttl("dq:{online/ticks/0}:producer:beat:beating:tick") <= 604_800
    client.close()


def test_the_state_of_a_deleted_entry_is_removed(state: tuple[dict[str, Any], Any], beats: Beats) -> None:
    conf, stored = state
    names = {"a", "b", "c"}
    first = make_app({**conf, "beat_schedule": {name: entry("ticks", 3600) for name in names}})
    second = make_app({**conf, "beat_schedule": {"a": entry("ticks", 3600)}})
    beats += [ElectedScheduler(first), ElectedScheduler(second)]
    lead(beats[0])
    beats[0].tick()
    assert stored() == names
    # The leader itself sees that an entry goes and that another one comes.
    del beats[0].schedule["b"]
    beats[0]._inner.add(name="d", **entry("ticks", 3600))
    wait_until(lambda: (beats[0].tick(), stored() == {"a", "c", "d"})[1], 30)
    beats[0].close()
    # The next leader has another schedule.
    lead(beats[1])
    beats[1].tick()
    assert stored() == {"a"}
    first.close()
    second.close()


def test_an_entry_that_was_dropped_and_comes_back_waits_for_its_next_time(
    state: tuple[dict[str, Any], Any], beats: Beats
) -> None:
    conf, _ = state
    hourly, other = {"tick": entry("ticks", 3600)}, {"other": entry("others", 3600)}
    apps = [make_app({**conf, "beat_schedule": each}) for each in (hourly, other, {**hourly, **other})]
    beats += [ElectedScheduler(each) for each in apps]
    lead(beats[0])
    beats[0].tick()
    due = beats[0].schedule["tick"]
    due.last_run_at -= timedelta(hours=2)
    beats[0]._refill()
    wait_until(lambda: (beats[0].tick(), beats[0].schedule["tick"].total_run_count == 1)[1], 30)
    # The tick was sent two hours ago.
    store, token = beats[0].schedule_store, beats[0]._token
    ago = datetime.now(timezone.utc) - timedelta(hours=2)
    number: Any = store.begin(token, "tick", beats[0].schedule["tick"].last_run_at)
    store.done(token, "tick", number, LastRun(ago, 2))
    beats[0].close()
    for beat in beats[1:]:
        lead(beat)
        for _ in range(3):
            beat.tick()
        if beat is beats[1]:
            beat.close()
    assert beats[2].schedule["tick"].total_run_count == 0
    for each in apps:
        each.close()
