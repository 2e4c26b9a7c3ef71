"""The commands of ``celery inspect`` and ``celery control`` that celery-dq adds to a worker."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from celery.worker.control import control_command, inspect_command

from celery_dq.context import AppContext
from celery_dq.errors import DQError

#: Seconds that a command waits for ZooKeeper: `celery control` waits a second for its answers.
LOOK_TIMEOUT_S = 0.4


@inspect_command()
def leaders(state: Any) -> list[dict[str, Any]]:
    """The queues that this worker leads, with the start of the term (UTC) and the fencing token."""
    leaderships = _part(state, "leaderships")
    rows = [] if leaderships is None else leaderships.report()
    return [{**row._asdict(), "since": _moment(row.since)} for row in rows]


@control_command(args=[("queue", str)], signature="<queue>")
def resign(state: Any, queue: str = "") -> Any:
    """Hand a singleton queue over to the next candidate when the running message has ended."""
    if not queue:
        return {"error": "name the singleton queue to hand over, such as: celery control resign ledger"}
    leaderships = _part(state, "leaderships")
    leads = {row.queue: bool(row.token) for row in leaderships.report()} if leaderships is not None else {}
    if queue not in leads:
        return {"error": f"this worker is not a candidate for queue {queue!r}"}
    if not leads[queue]:
        return {"ok": f"this worker does not lead {queue!r}, and has nothing to hand over"}
    leaderships.resign(queue, "asked to")
    return {"ok": f"this worker hands over {queue!r}"}


@inspect_command()
def allocation(state: Any) -> dict[str, Any]:
    """The partitions that this worker serves by the allocation (dq_allocation)."""
    found = _part(state, "allocation")
    return {"all": True} if found is None else dict(found.report())


@control_command(args=[("worker", str)], signature="<worker>")
def drain(state: Any, worker: str = "") -> Any:
    """Give the partitions of a worker to other workers, until it ends."""
    if not worker:
        example = "celery control drain celery@host-7"
        return {"error": f"name the worker that is to be emptied, such as: {example}"}
    found = _part(state, "allocation")
    if found is None:
        return {
            "error": "this worker has no allocated partitions (dq_allocation): to empty it, stop it with "
            "SIGTERM; it ends its running tasks and releases its other messages"
        }
    if worker == state.hostname:
        found.drain()
        return {"ok": "this worker gives its partitions away"}
    try:
        names = found.running(LOOK_TIMEOUT_S)
    except (OSError, DQError):
        return {
            "ok": f"this worker goes on; it cannot look for {worker!r}, because ZooKeeper does not answer"
        }
    if worker not in names:
        return {"error": f"no worker {worker!r} shares partitions; these do: {', '.join(sorted(names))}"}
    return {"ok": f"{worker} is asked to drain, and this worker goes on"}


def _moment(since: float) -> str | None:
    """Return a wall time in the form of ISO 8601; None for 0."""
    return datetime.fromtimestamp(since, timezone.utc).isoformat(timespec="seconds") if since else None


def _part(state: Any, name: str) -> Any:
    """Return an attribute of the worker's context; None without one."""
    return getattr(AppContext.of(state.consumer.conninfo), name, None)
