"""The state of the queues at a glance, for ``celery dq status``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis
from kombu.exceptions import OperationalError

from celery_dq.app.api.api import dq_of
from celery_dq.app.checks.doctor import check_server
from celery_dq.app.checks.finding import Finding
from celery_dq.errors import DQError
from celery_dq.inspector.leaders import LeaderSnapshot
from celery_dq.inspector.queues import QueueSnapshot, ZooKeeperQueueSnapshot

__all__ = ["Status", "read_status"]


@dataclass(frozen=True)
class Status:
    """The state of all queues.

    Attributes:
        broker: URL of the broker, without its password; "" when the settings are wrong.
        queues: The counts of each queue; none when the broker cannot be used.
        leaders: The leaders of singleton queues and of other elections.
        findings: Warnings about the queues; or the errors for which they cannot be read or used.
        setup_warnings: Number of warnings of ``celery dq doctor`` about the servers.
    """

    broker: str
    queues: tuple[QueueSnapshot | ZooKeeperQueueSnapshot, ...] = ()
    leaders: tuple[LeaderSnapshot, ...] = ()
    findings: tuple[Finding, ...] = ()
    setup_warnings: int = 0


def read_status(app: Any) -> Status:
    """Read the state of all queues. An error of a server becomes a finding."""
    broker = ""
    try:
        broker = app.connection_for_write().as_uri()
        found = check_server(app)
        errors = tuple(each for each in found if each.level == "error")
        if errors:
            return Status(broker, findings=errors)
        dq = dq_of(app)
        queues = tuple(dq.queues[name].snapshot(ages=False) for name in dq.queues)
        leaders = tuple(dq.leaders()) if dq.options.election or dq.serves_queues() else ()
    except (DQError, OperationalError, redis.RedisError, OSError) as exc:
        problem = f"The queues cannot be read: {str(exc) or type(exc).__name__}"
        return Status(
            broker, findings=(Finding("error", "E011", problem, "'celery dq doctor' checks the set-up."),)
        )
    warnings = tuple(_warnings(queues, leaders))
    return Status(broker, queues, leaders, warnings, sum(each.level == "warning" for each in found))


def _warnings(
    queues: tuple[QueueSnapshot | ZooKeeperQueueSnapshot, ...], leaders: tuple[LeaderSnapshot, ...]
) -> Iterator[Finding]:
    vacant = {each.name for each in leaders if each.state == "vacant"}
    for queue in queues:
        waiting = f"Messages wait in {queue.name!r} ({queue.waiting})"
        start = f"Start a worker with -Q {queue.name}."
        if queue.waiting and queue.name in vacant:
            yield Finding("warning", "W018", f"{waiting}, and no worker leads this singleton queue.", start)
        elif queue.waiting and isinstance(queue, QueueSnapshot) and not _is_consumed(queue):
            yield Finding("warning", "W019", f"{waiting}, and no living worker consumes it.", start)
        if queue.dead:
            remedy = f"Look at them with 'celery dq dead list {queue.name}', and replay or purge them."
            yield Finding("warning", "W020", f"{queue.name!r} has dead letters ({queue.dead}).", remedy)


def _is_consumed(queue: QueueSnapshot) -> bool:
    return any(each.lease_s > 0 for each in queue.consumers)
