"""Look at a queue in ZooKeeper."""

from __future__ import annotations

import click

from celery_dq.app.face import DQ
from celery_dq.cli.output import command, show_table

_COLUMNS = ("name", "mark", "items", "size", "put_at", "locked")


@click.command()
@click.argument("hosts")
@click.argument("path")
@click.option(
    "--kind",
    type=click.Choice(["plain", "id", "priority", "delay", "simple"]),
    default="plain",
    show_default=True,
    help="What the queue is; the names do not tell an id from a due time.",
)
@click.option("--locks", "lock_path", help="The folder of the locks, to see what is being consumed.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="Nodes to show.")
@command
def zookeeper(
    dq: DQ, as_json: bool, hosts: str, path: str, kind: str, lock_path: str | None, limit: int
) -> None:
    """The next nodes of the ZooKeeper queue at PATH, such as "celery dq zookeeper zk:2181/shop /mail"."""
    # Needs an extra that a user of Redis does not have.
    from celery_dq.curator.looking import look
    from celery_dq.curator.queue import check_path
    from celery_dq.zookeeper.session import Session

    check_path("PATH", path)
    session = Session(hosts)
    try:
        views = look(session, path, kind, lock_path=lock_path, limit=limit)
    finally:
        session.close()
    show_table(as_json, views, _COLUMNS, f"Nothing is in {path!r}.")
