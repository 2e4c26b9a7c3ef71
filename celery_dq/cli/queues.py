"""``celery dq queues``, ``tenants``, ``move`` and ``purge``: look at queues, move and delete messages."""

from __future__ import annotations

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import COUNT, command, show, show_table
from celery_dq.cli.typos import require_queue, unknown_tenant
from celery_dq.errors import InvalidRequest

_QUEUE_COLUMNS = (
    "name",
    "waiting",
    "delayed",
    "held",
    "discards",
    "dead",
    "at_concurrency",
    "paused",
    "consumers",
    "suspects",
    "unreadable",
)


@click.command()
@click.argument("names", nargs=-1)
@command
def queues(dq: DQ, as_json: bool, names: tuple[str, ...]) -> None:
    """Show the counts of queues (default: all queues)."""
    known = list(dq.queues)
    for name in names:
        require_queue(name, known)
    # The table has no ages, and each costs a look at the tenants.
    rows = [dq.queues[name].snapshot(ages=as_json) for name in names or known]
    show_table(as_json, rows, _QUEUE_COLUMNS, "No queue is declared yet.")


@click.command()
@click.argument("queue")
@click.option("--limit", default=50, show_default=True, type=COUNT, help="Tenants to show.")
@command
def tenants(dq: DQ, as_json: bool, queue: str, limit: int) -> None:
    """List the tenants with a backlog in QUEUE, in order of service."""
    require_queue(queue, dq.queues)
    columns = ("tenant", "state", "waiting", "running", "until", "quota")
    show_table(as_json, dq.queues[queue].tenants(limit), columns, f"No tenant has a backlog in {queue!r}.")


@click.command()
@click.argument("queue")
@click.argument("to")
@click.option("--task-id", help="This task.")
@click.option("--tenant", help="All waiting messages of this tenant.")
@click.option("--create", is_flag=True, help="Make the queue TO if it does not exist.")
@command
def move(
    dq: DQ, as_json: bool, queue: str, to: str, task_id: str | None, tenant: str | None, create: bool
) -> None:
    """Move a task, or all messages of a tenant, from QUEUE to the end of the queue TO.

    Exit status 1: no message was moved.
    """
    known = list(dq.queues)
    require_queue(queue, known)
    if not create:
        try:
            require_queue(to, known)
        except InvalidRequest as exc:
            raise InvalidRequest(f"{exc} No message was moved; --create makes the queue.") from None
    count = dq.queues[queue].move(to, task_id=task_id, tenant=tenant)
    show(as_json, {"moved": count}, f"Moved {count} to {to!r}.")
    if not count:
        unknown = "" if tenant is None else unknown_tenant(dq, queue, tenant)
        what = f"task {task_id}" if tenant is None else f"tenant {tenant!r}"
        raise InvalidRequest(unknown or f"No message of {what} waits in {queue!r}.")


@click.command()
@click.argument("queue")
@click.option("--force", "-f", is_flag=True, help="Do not ask.")
@command
def purge(dq: DQ, as_json: bool, queue: str, force: bool) -> None:
    """Remove all waiting and delayed messages of QUEUE. Messages that workers have stay."""
    require_queue(queue, dq.queues)
    if not force:
        click.confirm(f"Remove {dq.queues[queue].depth} messages for good?", abort=True, err=True)
    count = dq.queues[queue].purge()
    show(as_json, {"purged": count}, f"Purged {count}.")
