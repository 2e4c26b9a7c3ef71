"""``celery dq queues``, ``tenants``, ``move``, ``purge``, ``partitions``, ``pause`` and ``resume``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.arguments import UP_TO_A_DAY, duration, require_queue, seconds_option, time, unknown_tenant
from celery_dq.cli.bulk import bulk, change_many, counted, forget_each, reported_progress
from celery_dq.cli.output import COUNT, command, print_line, show, show_table
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.queues import QueueSnapshot
from celery_dq.inspector.tenants import BACKLOG_STATES, TenantState
from celery_dq.inspector.workers import worker_of
from celery_dq.options.sections import MAX_PARTITIONS

_QUEUE_COLUMNS = (
    *("name", "partitions", "waiting", "delayed", "held", "discards", "dead"),
    *("at_concurrency", "paused", "consumers", "suspects", "unreadable"),
)
_OF_SETTINGS = "only the settings name it, and the broker does not have it"


def with_used(columns: tuple[str, ...], rows: Sequence[Any], *others: str) -> tuple[str, ...]:
    """Add those of the other columns in which a row has a value, such as ``node`` on a Redis Cluster."""
    used = (name for name in others if any(getattr(row, name, None) not in (None, "") for row in rows))
    return (*columns, *used)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--forget", is_flag=True, help="Remove the unused queues NAMES, such as those of a typo in -Q.")
@command
def queues(dq: DQ, as_json: bool, names: tuple[str, ...], forget: bool) -> None:
    """Show the counts of queues (default: all queues), or forget unused ones."""
    known = list(dq.queues)
    for name in names:
        require_queue(name, known)
    if forget:
        forget_each(as_json, names, lambda name: dq.queues[name].forget(), "queue", _OF_SETTINGS)
        return
    # The table has no ages, and each costs a look at the tenants.
    rows = list(dq.queues.snapshots(*(names or known), ages=as_json))
    columns = with_used(_QUEUE_COLUMNS, rows, "pause", "slot", "node")
    if not as_json:
        # JSON has the counts of each of several partitions; the table has their number.
        rows = [
            replace(row, partitions=row.partitions or (row,)) if isinstance(row, QueueSnapshot) else row
            for row in rows
        ]
    show_table(as_json, rows, columns, "No queue is declared yet.")


_TENANT_COLUMNS = ("tenant", "state", "waiting", "running", "service.rate", "service.share", "until", "quota")


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
    rows = dq.queues[queue].tenants(limit) if page is None else page.tenants
    show_table(as_json, rows, with_used(_TENANT_COLUMNS, rows, "pause_cause"), nothing)
    if page is not None:
        end = f"others follow: --after {page.after}" if page.after else "there are no others."
        print_line(f"Looked at {counted(page.looked_at, 'tenant')}; {end}", err=as_json)


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
        interrupted="Repeat the command: up to 200 messages wait for it, or for ten minutes.",
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


_PARTITION_COLUMNS = ("name", "waiting", "held", "delayed", "consumers", "oldest_waiting_s", "tenants")


@click.command()
@click.argument("queue", required=False)
@click.option(
    "--set",
    "count",
    type=click.IntRange(1, MAX_PARTITIONS),
    help="Change the number of partitions of QUEUE, and move tenants with their messages.",
)
@seconds_option("--timeout", 60.0, "Seconds to wait for running tasks of tenants that move.", UP_TO_A_DAY)
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
        _set_partitions(dq, as_json, queue, count, timeout)
        return
    rows: list[Any] = []
    for found in dq.queues.snapshots(*(known if queue is None else [queue])):
        rows += getattr(found, "partitions", ()) or ([found] if queue else [])
    columns = with_used(_PARTITION_COLUMNS, rows, "slot", "node")
    if dq.workers.is_shared:
        sharing, columns = dq.workers.sharing(), (*columns, "worker")
        rows = [replace(row, worker=worker_of(row.name, sharing)) for row in rows]
    show_table(as_json, rows, columns, "No queue has several partitions.")


def _set_partitions(dq: DQ, as_json: bool, queue: str, count: int, timeout: float) -> None:
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


@click.command()
@click.argument("queue")
@click.option("--tenant", help="Only this tenant.")
@click.option("--until", type=time, help="End of the pause, such as 2026-03-01T18:00; local time.")
@click.option("--for", "length", type=duration, help="Length of the pause, such as 15m.")
@click.option("--in-advance", is_flag=True, help="Also pause a tenant without a message in QUEUE.")
@command
def pause(
    dq: DQ,
    as_json: bool,
    queue: str,
    tenant: str | None,
    until: datetime | None,
    length: timedelta | None,
    in_advance: bool,
) -> None:
    """Start no more tasks of QUEUE, or of a tenant, until a time or until it is resumed.

    Running tasks end normally, and messages are still accepted. The pause is kept in the broker. Given again,
    the command changes the end of the pause.
    """
    if until is not None and length is not None:
        raise click.UsageError("Give --until or --for, not both.")
    require_queue(queue, dq.queues)
    unknown = "" if in_advance or tenant is None else unknown_tenant(dq, queue, tenant)
    if unknown:
        raise InvalidRequest(f"{unknown} It was not paused; --in-advance pauses it before its first message.")
    found = dq.queues[queue].pause(tenant, until=until or length)
    whose = f"Queue {queue!r}" if tenant is None else f"Tenant {tenant!r} of {queue!r}"
    end = "it is resumed" if found.until is None else found.until.astimezone().isoformat(timespec="seconds")
    show(as_json, found, f"{whose} is paused until {end}.")


@click.command()
@click.argument("queue")
@click.option("--tenant", help="Only this tenant.")
@command
def resume(dq: DQ, as_json: bool, queue: str, tenant: str | None) -> None:
    """End the pause of QUEUE, or of a tenant. Exit status 1: it was not paused."""
    require_queue(queue, dq.queues)
    whose = f"Queue {queue!r}" if tenant is None else f"Tenant {tenant!r} of {queue!r}"
    if not dq.queues[queue].resume(tenant):
        unknown = "" if tenant is None else unknown_tenant(dq, queue, tenant)
        raise InvalidRequest(unknown or f"{whose} is not paused.")
    show(as_json, {"resumed": True}, f"{whose} is resumed.")
