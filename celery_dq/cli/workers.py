"""``celery dq workers``: the workers that share partitions."""

from __future__ import annotations

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show_table

COLUMNS = ("name", "state", "partitions", "queues")


@click.command()
@command
def workers(dq: DQ, as_json: bool) -> None:
    """Show the workers that share partitions (dq_allocation) with the number of their partitions and queues.

    --json has the names. 'celery dq partitions' shows the worker of each partition.
    """
    show_table(as_json, dq.workers(), COLUMNS, "No worker shares partitions.")
