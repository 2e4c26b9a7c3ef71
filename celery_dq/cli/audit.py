"""``celery dq audit``: who changed queues and quotas, and when."""

from __future__ import annotations

from datetime import datetime

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import COUNT, command, show_table
from celery_dq.cli.times import since as since_type
from celery_dq.cli.typos import require_queue

_COLUMNS = ("at", "by", "door", "action", "queue", "tenant", "count", "details")


@click.command()
@click.option("--since", type=since_type, help="Only changes since a time, or for as long as 2h.")
@click.option("--queue", help="Only changes of this queue.")
@click.option("--limit", default=50, show_default=True, type=COUNT, help="Changes to show.")
@command
def audit(dq: DQ, as_json: bool, since: datetime | None, queue: str | None, limit: int) -> None:
    """Show who changed quotas, pauses and messages, the latest change first.

    The broker keeps some 10,000 changes that were made through app.dq or celery dq.
    """
    entries = dq.audit(since=since, queue=queue, limit=limit)
    if not entries and queue is not None:
        require_queue(queue, dq.queues)
    show_table(as_json, entries, _COLUMNS, "No change is known.")
