"""The check of ``celery dq doctor`` of queues that are probably typos."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import redis

from celery_dq.app.api.api import dq_of
from celery_dq.app.checks.finding import Finding
from celery_dq.inspector.queues import QueueSnapshot
from celery_dq.transport.redis.store.refusals import BrokerRefused
from celery_dq.worker.new_queues import queues_of_settings

__all__ = ["unused_queues"]

#: Queues that the finding names.
_MOST_NAMED = 10


def unused_queues(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the broker has queues that never had a message, and that no setting names."""
    dq = dq_of(app)
    named = queues_of_settings(app, dq.options)
    try:
        known = [*dq.queues]
    except (redis.exceptions.NoPermissionError, BrokerRefused):
        return  # the check of the rights reports it
    unnamed = [name for name in known if name not in named]
    found = [each for each in dq.queues.snapshots(*unnamed, ages=False) if unnamed and _is_unused(each)]
    if not found:
        return
    others = [name for name in known if name not in {each.name for each in found}]
    listed = ", ".join(_described(each, others) for each in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    yield Finding(
        "warning",
        "W026",
        f"These queues never had a message, and no setting names them: {listed}{more}. A typo in -Q makes "
        "such a queue.",
        f"Remove them: celery dq queues {found[0].name} --forget. Or name them in task_queues or dq_queues.",
    )


def _is_unused(queue: Any) -> bool:
    return isinstance(queue, QueueSnapshot) and not queue.counters.pushed + queue.dead


def _described(queue: Any, others: list[str]) -> str:
    notes = []
    if any(each.lease_s > 0 for each in queue.consumers):
        notes.append("a worker consumes it")
    close = get_close_matches(queue.name, others, 1)
    if close:
        notes.append(f"did you mean {close[0]!r}?")
    return f"{queue.name!r} ({'; '.join(notes)})" if notes else repr(queue.name)
