"""``celery dq partitions``: look at the partitions of queues, and change their number."""

from __future__ import annotations

from dataclasses import replace

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show, show_table
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
    help="Change the number of partitions of QUEUE, which must be empty.",
)
@command
def partitions(dq: DQ, as_json: bool, queue: str | None, count: int | None) -> None:
    """Show the partitions of QUEUE, by default of all queues with several; or change their number.

    A second --set completes an interrupted one.
    """
    known = list(dq.queues)
    if queue is not None:
        require_queue(queue, known)
    if count is not None:
        if queue is None:
            raise click.UsageError("--set needs a QUEUE.")
        if not dq.serves_queues():
            raise InvalidRequest("--set needs partitions, which this broker does not have.")
        _set(dq, as_json, queue, count)
        return
    rows: list[QueueSnapshot] = []
    for name in known if queue is None else [queue]:
        found = dq.queues[name].snapshot()
        rows += getattr(found, "partitions", ()) or ([found] if queue else [])
    columns = _COLUMNS
    if dq.workers.is_enabled:
        sharing, columns = dq.workers(), (*_COLUMNS, "worker")
        rows = [replace(row, worker=worker_of(row.name, sharing)) for row in rows]
    show_table(as_json, rows, columns, "No queue has several partitions.")


def _set(dq: DQ, as_json: bool, queue: str, count: int) -> None:
    change = dq.queues[queue].set_partitions(count)
    lines = [f"{queue!r} has {change.after} partitions (before: {change.before})."]
    if change.moved:
        lines.append(f"Messages published meanwhile were moved to their partitions: {change.moved}.")
    lines.append(f"Set dq_queues[{queue!r}]['partitions'] = {count} in the settings.")
    show(as_json, change, "\n".join(lines))
