"""The checks of ``celery dq doctor`` of queues that contradict the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import redis

from celery_dq.app.api.api import DQ, dq_of
from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.checks.finding import Finding
from celery_dq.inspector.queues import QueueSnapshot
from celery_dq.inspector.redis_values import number
from celery_dq.shown import shell_word
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds
from celery_dq.transport.redis.store.server_errors import BrokerRefused
from celery_dq.worker.singleton import singleton_queues
from celery_dq.worker.start_checks import queues_of_settings, routed_queues

__all__ = ["former_singleton_queues", "unrouted_quotas", "unused_queues"]

#: Queues that the finding names.
_MOST_NAMED = 10


def unused_queues(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the broker has queues that never had a message, and that no setting names."""
    dq = dq_of(app)
    named = queues_of_settings(app, dq.options)
    try:
        known = [*dq.queues]
        found = _unused(dq, [name for name in known if name not in named])
    except (redis.exceptions.NoPermissionError, BrokerRefused):
        return  # the check of the rights reports it
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
        f"Remove them: celery dq queues {shell_word(found[0].name)} --forget. Or name them in task_queues "
        "or dq_queues.",
    )


def unrouted_quotas(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether a queue has quotas, and neither a message so far nor a task whose calls go there."""
    tasks = [task for name, task in app.tasks.items() if not name.startswith("celery.")]
    if not tasks:
        return  # a program that only calls tasks by their names
    dq = dq_of(app)
    limited = {each.name for each in dq.options.queues if each.names_quota}
    routed = routed_queues(app) | {name for task in tasks for name in _queue_of(app, task)}
    try:
        found = _unused(dq, sorted({*dq.queues, *limited} - routed))
        names = _with_quotas(app, [each.name for each in found], limited)
    except (redis.exceptions.NoPermissionError, BrokerRefused):
        return  # the check of the rights reports it
    if names:
        listed = ", ".join(map(repr, names[:_MOST_NAMED]))
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        yield Finding(
            "warning",
            "W035",
            f"These queues have quotas, never had a message, and no task is routed to them: {listed}{more}. "
            "Their quotas limit nothing.",
            f"Route the tasks that they are for: task_routes = {{'<task>': {names[0]!r}}}. Or name the queue "
            "in the calls.",
        )


def _queue_of(app: Any, task: Any) -> Iterator[str]:
    """Yield the queue of a call without arguments. A route may be a function, which may fail for that."""
    with suppress(Exception):
        yield app.amqp.router.route({}, task.name, (), {}, task)["queue"].name


def _with_quotas(app: Any, names: list[str], limited: set[str]) -> list[str]:
    """Return those of some queues that have a quota in the settings, or stored in the broker."""
    others = [name for name in names if name not in limited]
    stored = set[str]()
    if others:
        with BrokerAccess(app, dq_of(app).context).open_all(others) as queues:
            partitions = [each for queue in queues for each in queue.partitions]
            counts = run_rounds(queues[0].client, map(_count_quotas, partitions))
        stored = {each.keys.queue for each, count in zip(partitions, counts, strict=True) if count}
    return [name for name in names if name in limited or name in stored]


def _count_quotas(partition: Partition) -> Rounds[int]:
    (count,) = yield lambda pipe: pipe.hlen(partition.keys.quotas)
    return int(count)


def _unused(dq: DQ, names: list[str]) -> list[Any]:
    """Return the snapshots of those queues that never had a message."""
    snapshots = dq.queues.snapshots(*names, ages=False) if names else ()
    return [
        each for each in snapshots if isinstance(each, QueueSnapshot) and not each.counters.pushed + each.dead
    ]


def former_singleton_queues(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the broker has singleton queues that no setting names; ordinary workers get nothing of them."""
    dq = dq_of(app)
    expected = singleton_queues(app, dq.options)
    try:
        names = [name for name in dq.queues if name not in expected]
        pipeline = channel.client.pipeline(transaction=False)
        for name in names:
            pipeline.hget(channel.partition(name).keys.state, "epoch")
        epochs = pipeline.execute()
    except (redis.exceptions.NoPermissionError, BrokerRefused):
        return  # the check of the rights reports it
    found = [name for name, epoch in zip(names, epochs, strict=True) if number(epoch)]
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        yield Finding(
            "warning",
            "W036",
            "These queues are singleton queues in the broker, but not in the settings: "
            f"{', '.join(map(repr, found[:_MOST_NAMED]))}{more}. Ordinary workers get no messages of them.",
            f"Make them ordinary queues: celery dq leaders {shell_word(found[0])} --forget. "
            "Or name them in dq_singleton_queues.",
        )


def _described(queue: Any, others: list[str]) -> str:
    notes = []
    if queue.living_consumers:
        notes.append("a worker consumes it")
    close = get_close_matches(queue.name, others, 1)
    if close:
        notes.append(f"did you mean {close[0]!r}?")
    return f"{queue.name!r} ({'; '.join(notes)})" if notes else repr(queue.name)
