"""Beats that elect one of them, on a real broker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from kombu import pools

import celery_dq
from celery_dq.beat import ElectedScheduler
from celery_dq.beat.scheduler import NAMESPACE
from celery_dq.testing.waiting import wait_until
from tests.workers import ROOT

EVERY_S = 0.4


@pytest.fixture
def app(redis_url: str) -> Iterator[Any]:
    made = Celery("beating", broker=redis_url.replace("redis://", "dq-redis://"), set_as_current=False)
    celery_dq.setup(made)
    made.conf.update(
        dq_election_session=1.2,
        beat_schedule={
            "tick": {"task": "tick", "schedule": timedelta(seconds=EVERY_S), "options": {"queue": "ticks"}}
        },
    )
    yield made
    made.close()
    pools.reset()


@pytest.fixture
def beats(app: Any) -> Iterator[list[ElectedScheduler]]:
    made: list[ElectedScheduler] = []
    yield made
    for beat in made:
        beat.office.close(5)


def ticks(app: Any) -> list[str]:
    """The ids of what was sent, in the order of the queue."""
    return [message.id for message in app.dq.queues["ticks"].peek(limit=100)]


def lead(beat: ElectedScheduler) -> None:
    wait_until(lambda: beat.office.term is not None and beat.office.term.firm, 10)


def test_one_of_two_ticks(app: Any, beats: list[ElectedScheduler]) -> None:
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    until = time.monotonic() + 5 * EVERY_S
    while time.monotonic() < until:
        for beat in beats:
            beat.tick()
        time.sleep(0.02)
    sent = ticks(app)
    assert 3 <= len(sent) <= 6
    assert len(set(sent)) == len(sent)
    assert not any("~" in message_id for message_id in sent)


def test_the_next_leader_goes_on_where_the_last_one_ended(app: Any, beats: list[ElectedScheduler]) -> None:
    beats += [ElectedScheduler(app), ElectedScheduler(app)]
    lead(beats[0])
    wait_until(lambda: (beats[0].tick(), len(ticks(app)) >= 2)[1], 10)
    last = beats[0].schedule["tick"].last_run_at
    beats[0].office.close(5)
    lead(beats[1])
    beats[1].tick()
    assert beats[1].schedule["tick"].last_run_at >= last
    wait_until(lambda: (beats[1].tick(), len(ticks(app)) >= 4)[1], 10)
    assert len(set(ticks(app))) == len(ticks(app))


def test_a_tick_that_was_sent_is_not_sent_again(app: Any, beats: list[ElectedScheduler]) -> None:
    # Two that both believe to lead, as after a pause, and know the same last run.
    beats += [ElectedScheduler(app, lazy=True), ElectedScheduler(app, lazy=True)]
    for beat in beats:
        beat._inner.setup_schedule()
    entries = [beat._inner.schedule["tick"] for beat in beats]
    entries[1].last_run_at = entries[0].last_run_at
    for beat, entry in zip(beats, entries, strict=True):
        beat.apply_async(entry, advance=False)
    due_us = beats[0]._due_us(entries[0])
    assert ticks(app) == [str(uuid.uuid5(NAMESPACE, f"online/tick/{due_us}"))]


def test_celery_beat_runs_it(redis_url: str, app: Any) -> None:
    program = (
        "import celery_dq, datetime; from celery import Celery\n"
        f"app = Celery('beating', broker={app.conf.broker_url!r}); celery_dq.setup(app)\n"
        "app.conf.update(dq_election_session=1.2, beat_schedule={'tick': {'task': 'tick', "
        f"'schedule': datetime.timedelta(seconds={EVERY_S}), 'options': {{'queue': 'ticks'}}}}}})\n"
        "app.start(['beat', '-S', 'celery_dq.beat:ElectedScheduler', '-l', 'INFO', '--pidfile', ''])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    beats = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    try:
        wait_until(lambda: len(ticks(app)) >= 3, 20)
        beats[0].kill()
        beats[0].wait(10)
        wait_until(lambda: len(ticks(app)) >= 10, 20)
        beats[1].terminate()
        beats[1].wait(20)
    finally:
        for beat in beats:
            beat.kill()
            beat.wait(10)
    assert len(set(ticks(app))) == len(ticks(app))
    assert not any("~" in message_id for message_id in ticks(app))
