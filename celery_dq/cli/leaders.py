"""``celery dq leaders``: the leaders of singleton queues and of other elections."""

from __future__ import annotations

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show_table
from celery_dq.cli.typos import nearest
from celery_dq.errors import InvalidRequest

COLUMNS = ("name", "state", "leader", "token", "since", "candidates")


@click.command()
@click.argument("names", nargs=-1)
@command
def leaders(dq: DQ, as_json: bool, names: tuple[str, ...]) -> None:
    """Show the leaders of singleton queues and of other elections, without asking workers.

    NAMES are queues, or names of other elections. Exit status 1: one of NAMES never had a candidate.
    """
    rows = dq.leaders(*names)
    if names and any(not row.candidates and not row.leader for row in rows):
        known = dq.leaders.known()
        for row in rows:
            if not row.candidates and not row.leader and row.name not in known:
                listed = f" Known: {', '.join(map(repr, known[:10]))}." if known else ""
                raise InvalidRequest(f"{row.name!r} never had a leader.{nearest(row.name, known) or listed}")
    show_table(as_json, rows, COLUMNS, "No queue is a singleton queue, and no other election is known.")
