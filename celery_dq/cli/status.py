"""``celery dq status``, ``leaders``, ``workers``, ``doctor`` and ``audit``: reports on the whole set-up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.checks.doctor import Status, check_server, check_settings, check_tasks, read_status
from celery_dq.app.checks.finding import Finding
from celery_dq.cli.arguments import (
    ABOVE_0,
    listed,
    nearest,
    require_queue,
    seconds_option,
    since as since_type,
)
from celery_dq.cli.bulk import forget_each
from celery_dq.cli.output import COUNT, command, print_line, show, show_table
from celery_dq.cli.queues import with_used
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.queues import QueueSnapshot
from celery_dq.inspector.workers import WorkerSnapshot

_QUEUE_COLUMNS = (
    *("name", "waiting", "delayed", "held", "dead"),
    *("eligible", "throttled", "at_concurrency", "paused", "consumers", "suspects", "unreadable"),
)
#: A queue is shown if one of these is not 0 or None.
_IN_USE = ("waiting", "delayed", "held", "discards", "dead", "consumers", "unreadable", "pause")


@click.command()
@seconds_option("--timeout", 5.0, "Seconds within which all servers must answer.", ABOVE_0)
@command
def status(dq: DQ, as_json: bool, timeout: float) -> None:
    """Show on one screen whether messages wait, and for what.

    Exit status 0: all is well. 1: there are warnings: messages without a worker, a singleton queue or a beat
    without a leader, dead letters, or rows of an outbox that wait or were refused. 2: a setting is wrong, the
    tasks cannot be imported, or a server cannot be reached or used.
    """
    app = click.get_current_context().obj.app
    found = read_status(app, timeout)
    if as_json:
        show(True, found)
    else:
        _print(found)
    levels = {each.level for each in found.findings}
    if levels:
        raise SystemExit(2 if "error" in levels else 1)


def _print(found: Status) -> None:
    tenant_queues = [each for each in found.queues if isinstance(each, QueueSnapshot)]
    alive = [each for each in found.workers if (each.lease_s or 0) > 0]
    rows = [each for each in found.queues if any(getattr(each, name, 0) for name in _IN_USE)]
    counts = f"; queues: {len(found.queues)}" if found.queues else ""
    counts += f", living consumers: {len(alive)}" if tenant_queues else ""
    if found.broker:
        print_line(f"Broker {found.broker}{counts}")
    if rows:
        click.echo()
        show_table(False, rows, with_used(_QUEUE_COLUMNS, rows, "pause"), "")
    if found.leaders:
        click.echo()
        show_table(False, found.leaders, _LEADER_COLUMNS, "")
    columns = worker_columns(found.workers)
    if "partitions" in columns:
        click.echo()
        show_table(False, found.workers, columns, "")
    if found.outboxes:
        click.echo()
        show_table(False, found.outboxes, _OUTBOX_COLUMNS, "")
    if found.broker:
        click.echo()
    for finding in found.findings:
        print_line(line_of(finding))
    if not found.findings and len(tenant_queues) == len(found.queues):
        print_line("OK      No message waits without a worker, and no queue has dead letters.")
    elif not found.findings:
        # ZooKeeper does not know which workers consume a queue.
        print_line("OK      No queue has dead letters. It is not known whether workers consume the queues.")
    if found.setup_warnings:
        print_line(f"The set-up has warnings ({found.setup_warnings}), which 'celery dq doctor' shows.")


_OUTBOX_COLUMNS = ("database", "rows", "oldest_s", "refused")
_LEADER_COLUMNS = ("name", "state", "leader", "token", "since", "candidates")


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
    if forget:
        forget_each(as_json, names, dq.leaders.forget, "leadership", "never had a leader")
        return
    rows = dq.leaders(*names)
    if names and any(not row.candidates and not row.leader for row in rows):
        known = dq.leaders.known()
        for row in rows:
            if not row.candidates and not row.leader and row.name not in known:
                others = nearest(row.name, known) or (f" Known: {listed(known)}." if known else "")
                raise InvalidRequest(f"{row.name!r} never had a leader.{others}")
    nothing = "No queue is a singleton queue, and no other election is known."
    show_table(as_json, rows, _LEADER_COLUMNS, nothing)


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


@click.command()
@click.option("--watch", is_flag=True, help="Check again and again, and show changes, until Ctrl-C.")
@seconds_option("--interval", 30.0, "Seconds between two checks of --watch.", click.FloatRange(0.1))
@command
def doctor(dq: DQ, as_json: bool, watch: bool, interval: float) -> None:
    """Check the settings, the tasks' tenants, and the server. Exit status 1: an error was found."""
    app = click.get_current_context().obj.app
    tasks = check_tasks(app)
    findings = tasks + _check(app)
    show(as_json, findings, [line_of(each) for each in findings])
    try:
        while watch:
            time.sleep(interval)
            before, findings = findings, tasks + _check(app)
            _show_changes(as_json, before, findings)
    except KeyboardInterrupt:
        pass
    if any(each.level == "error" for each in findings):
        raise SystemExit(1)


def _check(app: Any) -> list[Finding]:
    return [*check_settings(app), *check_server(app)]


def _show_changes(as_json: bool, before: list[Finding], now: list[Finding]) -> None:
    """Print the problems that are new, and those that are over."""
    for sign, found, others in (("+", now, before), ("-", before, now)):
        for finding in found:
            if finding.level != "ok" and finding not in others:
                at = datetime.now().astimezone().isoformat(timespec="seconds")
                data = {"at": at, "is_over": sign == "-", "finding": finding}
                show(as_json, data, f"{at} {sign} {line_of(finding)}")


def line_of(finding: Finding) -> str:
    """Return the line of a finding; the code of a problem leads to the table in the documentation."""
    problem = finding.problem if finding.problem.endswith((".", "?")) else f"{finding.problem}."
    text = f"{finding.level.upper():8}{problem} {finding.remedy}".rstrip()
    return text if finding.level == "ok" else f"{text} ({finding.code})"


_CHANGE_COLUMNS = ("at", "by", "door", "action", "queue", "tenant", "count", "details")


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
    show_table(as_json, entries, _CHANGE_COLUMNS, "No change is known.")
