"""``celery dq leaders``: the leaders of singleton queues and of other elections."""

from __future__ import annotations

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show, show_table
from celery_dq.cli.typos import nearest
from celery_dq.errors import InvalidRequest

COLUMNS = ("name", "state", "leader", "token", "since", "candidates")


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--forget", is_flag=True, help="End the singleton queues NAMES: any worker may consume them again."
)
@command
def leaders(dq: DQ, as_json: bool, names: tuple[str, ...], forget: bool) -> None:
    """Show the leaders of singleton queues and of other elections, without asking workers.

    NAMES are queues, or names of other elections. Exit status 1: one of NAMES never had a candidate, or a
    worker leads one that is to be forgotten.
    """
    if forget and not names:
        raise click.UsageError("--forget needs NAMES.")
    if forget:
        forgotten = {name: dq.leaders.forget(name) for name in names}
        lines = [
            f"{name!r}: {'forgotten' if done else 'never had a leader'}" for name, done in forgotten.items()
        ]
        show(as_json, {"forgotten": [name for name, done in forgotten.items() if done]}, lines)
        return
    rows = dq.leaders(*names)
    if names and any(not row.candidates and not row.leader for row in rows):
        known = dq.leaders.known()
        for row in rows:
            if not row.candidates and not row.leader and row.name not in known:
                listed = f" Known: {', '.join(map(repr, known[:10]))}." if known else ""
                raise InvalidRequest(f"{row.name!r} never had a leader.{nearest(row.name, known) or listed}")
    show_table(as_json, rows, COLUMNS, "No queue is a singleton queue, and no other election is known.")
