"""An app with one periodic task, and a view of the sent messages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from kombu import pools

import celery_dq
from celery_dq.beat import ElectedScheduler
from celery_dq.testing.waiting import wait_until

EVERY_S = 0.4
Beats = list[ElectedScheduler]


def settings(broker_url: str, **conf: Any) -> dict[str, Any]:
    return {
        "broker_url": broker_url.replace("redis://", "dq-redis://", 1),
        # So long that no session expires and no answer is too late when the machine is stopped for a moment.
        "dq_election_session": 8,
        "beat_schedule": {"tick": {"task": "tick", "schedule": EVERY_S, "options": {"queue": "ticks"}}},
        **conf,
    }


def make_app(conf: dict[str, Any]) -> Any:
    made = Celery("beating", set_as_current=False)
    made.conf.update(conf)
    celery_dq.setup(made)
    return made


@pytest.fixture
def conf(redis_url: str) -> dict[str, Any]:
    return settings(redis_url)


@pytest.fixture
def app(conf: dict[str, Any]) -> Iterator[Any]:
    made = make_app(conf)
    yield made
    made.close()
    pools.reset()


@pytest.fixture
def beats() -> Iterator[Beats]:
    made: Beats = []
    yield made
    for beat in made:
        beat.close()


def ticks(app: Any) -> list[str]:
    """Return the ids of the sent messages in the order of the queue; a duplicate ends in ``~1``."""
    return [message.id for message in app.dq.queues["ticks"].peek(limit=200)]


def lead(beat: ElectedScheduler) -> None:
    def leads() -> bool:
        beat.elector.open()
        return beat.elector.term is not None and beat.elector.term.is_firm

    wait_until(leads)


def tick_until(beat: ElectedScheduler, app: Any, count: int) -> None:
    """Call tick() until `count` messages were sent."""

    def enough() -> bool:
        beat.tick()
        return len(ticks(app)) >= count

    wait_until(enough, 60, what=f"{count} ticks")


def overdue(beat: ElectedScheduler) -> None:
    """Make the entry due now."""
    entry = beat.schedule["tick"]
    entry.last_run_at -= timedelta(seconds=EVERY_S)
    beat._inner._heap = None


def once(app: Any) -> bool:
    sent = ticks(app)
    return len(set(sent)) == len(sent) and not any("~" in message_id for message_id in sent)
