"""``celery dq partitions``: look at the partitions of queues, and change their number."""

from __future__ import annotations

from dataclasses import replace

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show, show_table
from celery_dq.cli.progress import counted, reported_progress
from celery_dq.cli.queues import with_nodes
from celery_dq.cli.typos import require_queue
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.queues import QueueSnapshot
from celery_dq.inspector.workers import worker_of
from celery_dq.options.sections import MAX_PARTITIONS

_COLUMNS: tuple[str, ...] = ("name", "waiting", "held", "delayed", "consumers", "oldest_waiting_s", "tenants")


@click.command()
@click.argument("queue", required=False)
@click.option(
    "--set",
    "count",
    type=click.IntRange(1, MAX_PARTITIONS),
    help="Change the number of partitions of QUEUE, and move tenants with their messages.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, 86_400),
    default=60.0,
    show_default=True,
    help="Seconds to wait for running tasks of tenants that move.",
)
@command
def partitions(dq: DQ, as_json: bool, queue: str | None, count: int | None, timeout: float) -> None:
    """Show the partitions of QUEUE, by default of all queues with several; or change their number.

    The same --set goes on with a change that is not complete.
    """
    known = list(dq.queues)
    if queue is not None:
        require_queue(queue, known)
    if count is not None:
        if queue is None:
            raise click.UsageError("--set needs a QUEUE.")
        if not dq.serves_queues():
            raise InvalidRequest("--set needs partitions, which this broker does not have.")
        _set(dq, as_json, queue, count, timeout)
        return
    rows: list[QueueSnapshot] = []
    for name in known if queue is None else [queue]:
        found = dq.queues[name].snapshot()
        rows += getattr(found, "partitions", ()) or ([found] if queue else [])
    columns = with_nodes(_COLUMNS, rows)
    if dq.workers.is_shared:
        sharing, columns = dq.workers.sharing(), (*columns, "worker")
        rows = [replace(row, worker=worker_of(row.name, sharing)) for row in rows]
    show_table(as_json, rows, columns, "No queue has several partitions.")


def _set(dq: DQ, as_json: bool, queue: str, count: int, timeout: float) -> None:
    with reported_progress(as_json, "moved", "message") as on_progress:
        change = dq.queues[queue].set_partitions(count, timeout=timeout, on_progress=on_progress)
    number = counted(change.after, "partition")
    if change.before == change.after and not change.moved:
        show(as_json, change, f"{queue!r} has {number} already; nothing was changed.")
        return
    lines = [f"{queue!r} has {number} (before: {change.before})."]
    if change.moved:
        lines.append(f"Messages and dead letters moved: {change.moved}.")
    lines.append(f"Set dq_queues[{queue!r}]['partitions'] = {count} in the settings.")
    show(as_json, change, lines)
