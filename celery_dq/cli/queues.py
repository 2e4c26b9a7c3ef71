"""``celery dq queues``, ``tenants``, ``move`` and ``purge``: look at queues, move and delete messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.bulk import bulk, change_many
from celery_dq.cli.output import COUNT, command, print_line, show, show_table
from celery_dq.cli.progress import counted
from celery_dq.cli.typos import require_queue, unknown_tenant
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.queues import QueueSnapshot
from celery_dq.inspector.tenants import BACKLOG_STATES, TenantSnapshot, TenantState
from celery_dq.options import Quota

_QUEUE_COLUMNS = (
    "name",
    "partitions",
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


_OF_SETTINGS = "only the settings name it, and the broker does not have it"


def with_pauses(columns: tuple[str, ...], rows: Sequence[Any]) -> tuple[str, ...]:
    """Add the column ``pause`` if a queue is paused."""
    return (*columns, "pause") if any(getattr(row, "pause", None) for row in rows) else columns


def with_nodes(columns: tuple[str, ...], rows: Sequence[Any]) -> tuple[str, ...]:
    """Add the columns ``slot`` and ``node`` on a Redis Cluster."""
    return (*columns, "slot", "node") if any(getattr(row, "node", "") for row in rows) else columns


@click.command()
@click.argument("names", nargs=-1)
@click.option("--forget", is_flag=True, help="Remove the unused queues NAMES, such as those of a typo in -Q.")
@command
def queues(dq: DQ, as_json: bool, names: tuple[str, ...], forget: bool) -> None:
    """Show the counts of queues (default: all queues), or forget unused ones."""
    if forget and not names:
        raise click.UsageError("--forget needs NAMES.")
    known = list(dq.queues)
    for name in names:
        require_queue(name, known)
    if forget:
        forgotten = {name: dq.queues[name].forget() for name in names}
        lines = [f"{name!r}: {'forgotten' if done else _OF_SETTINGS}" for name, done in forgotten.items()]
        show(as_json, {"forgotten": [name for name, done in forgotten.items() if done]}, lines)
        return
    # The table has no ages, and each costs a look at the tenants.
    rows = list(dq.queues.snapshots(*(names or known), ages=as_json))
    columns = with_nodes(with_pauses(_QUEUE_COLUMNS, rows), rows)
    if not as_json:
        # JSON has the counts of each of several partitions; the table has their number.
        rows = [
            replace(row, partitions=row.partitions or (row,)) if isinstance(row, QueueSnapshot) else row
            for row in rows
        ]
    show_table(as_json, rows, columns, "No queue is declared yet.")


@click.command()
@click.argument("queue")
@click.option("--like", default="", help="Those with this text in their name, in any case of its letters.")
@click.option("--state", type=click.Choice(BACKLOG_STATES), help="Those in this state.")
@click.option("--after", help="Continue a search, at the place that its last line names.")
@click.option("--limit", default=50, show_default=True, type=COUNT, help="Tenants to show.")
@command
def tenants(
    dq: DQ,
    as_json: bool,
    queue: str,
    like: str,
    state: TenantState | None,
    after: str | None,
    limit: int,
) -> None:
    """List the tenants with a backlog in QUEUE, in order of service.

    The rate is that of the last minutes, of the one that quota and weight allow. The share is the part of
    all claims, of the part that the weight is worth.

    A search with --like or --state goes partition by partition, ends after 10,000 names, and says how far it
    looked; --after "" begins such a search for all tenants.
    """
    require_queue(queue, dq.queues)
    page, nothing = None, f"No tenant has a backlog in {queue!r}."
    if like or state or after is not None:
        page = dq.queues[queue].tenant_page(after or "", text_in_name=like, state=state, limit=limit)
        nothing = "No tenant matches."
    found: Sequence[TenantSnapshot] = dq.queues[queue].tenants(limit) if page is None else page.tenants
    rows = found if as_json else [_TenantRow.of(each) for each in found]
    columns = [each.name for each in fields(_TenantRow)]
    show_table(as_json, rows, columns, nothing)
    if page is not None:
        end = f"others follow: --after {page.after}" if page.after else "there are no others."
        print_line(f"Looked at {counted(page.looked_at, 'tenant')}; {end}", err=as_json)


@dataclass(frozen=True)
class _TenantRow:
    """A tenant in the table of ``celery dq tenants``: its rate and its share, each beside the one due."""

    tenant: str
    state: TenantState
    waiting: int
    running: int
    rate: str
    share: str
    until: datetime | None
    quota: Quota

    @classmethod
    def of(cls, found: TenantSnapshot) -> _TenantRow:
        return cls(
            found.tenant,
            found.state,
            found.waiting,
            found.running,
            found.service.rate,
            found.service.share,
            found.until,
            found.quota,
        )


@click.command()
@click.argument("queue")
@click.argument("to")
@click.option("--task-id", help="This task.")
@click.option("--tenant", help="All waiting messages of this tenant.")
@click.option("--create", is_flag=True, help="Make the queue TO if it does not exist.")
@bulk
@command
def move(
    dq: DQ,
    as_json: bool,
    queue: str,
    to: str,
    task_id: str | None,
    tenant: str | None,
    create: bool,
    dry_run: bool,
    yes: bool,
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

    def nothing() -> str:
        unknown = "" if tenant is None else unknown_tenant(dq, queue, tenant)
        what = f"task {task_id}" if tenant is None else f"tenant {tenant!r}"
        raise InvalidRequest(unknown or f"No message of {what} waits in {queue!r}.")

    change_many(
        as_json,
        partial(dq.queues[queue].move, to, task_id=task_id, tenant=tenant),
        word="moved",
        question=f"Move {{}} from {queue!r} to the end of {to!r}?",
        dry_run=dry_run,
        yes=yes or task_id is not None,
        nothing=nothing,
    )


@click.command()
@click.argument("queue")
@bulk
@command
def purge(dq: DQ, as_json: bool, queue: str, dry_run: bool, yes: bool) -> None:
    """Remove all waiting and delayed messages of QUEUE. Messages that workers have stay."""
    require_queue(queue, dq.queues)
    change_many(
        as_json,
        dq.queues[queue].purge,
        word="purged",
        question=f"Remove {{}} from {queue!r} for good?",
        dry_run=dry_run,
        yes=yes,
    )
