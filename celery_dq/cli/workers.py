"""``celery dq workers``: the workers that consume queues."""

from __future__ import annotations

from collections.abc import Sequence

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show_table
from celery_dq.inspector.workers import WorkerSnapshot


@click.command()
@command
def workers(dq: DQ, as_json: bool) -> None:
    """Show the workers, with the seconds of their leases, their messages, and the number of their queues.

    With dq_allocation also the number of their partitions; 'celery dq partitions' shows the worker of each.
    --json has the names.
    """
    rows = dq.workers()
    show_table(as_json, rows, worker_columns(rows), "No worker consumes a queue.")


def worker_columns(rows: Sequence[WorkerSnapshot]) -> tuple[str, ...]:
    """Return the columns of a table of workers; that of partitions if a worker shares them."""
    shared = any(each.state not in ("alive", "lost") for each in rows)
    return ("name", "state", "lease_s", "held", *(("partitions",) if shared else ()), "queues")
