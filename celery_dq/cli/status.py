"""``celery dq status``: the queues, consumers and leaders on one screen."""

from __future__ import annotations

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.checks.status import Status, read_status
from celery_dq.cli.doctor import line_of
from celery_dq.cli.leaders import COLUMNS as LEADER_COLUMNS
from celery_dq.cli.output import command, print_line, show, show_table
from celery_dq.cli.queues import with_pauses
from celery_dq.cli.workers import worker_columns
from celery_dq.inspector.queues import QueueSnapshot

_QUEUE_COLUMNS = (
    *("name", "waiting", "delayed", "held", "dead"),
    *("eligible", "throttled", "at_concurrency", "paused", "consumers", "suspects", "unreadable"),
)
#: A queue is shown if one of these is not 0 or None.
_IN_USE = ("waiting", "delayed", "held", "discards", "dead", "consumers", "unreadable", "pause")


@click.command()
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds within which all servers must answer.",
)
@command
def status(dq: DQ, as_json: bool, timeout: float) -> None:
    """Show on one screen whether messages wait, and for what.

    Exit status 0: all is well. 1: there are warnings: messages without a worker, a singleton queue or a beat
    without a leader, or dead letters. 2: a setting is wrong, or a server cannot be reached or used.
    """
    app = click.get_current_context().obj.app
    app.loader.import_default_modules()  # the options of tasks are checked, too
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
        show_table(False, rows, with_pauses(_QUEUE_COLUMNS, rows), "")
    if found.leaders:
        click.echo()
        show_table(False, found.leaders, LEADER_COLUMNS, "")
    columns = worker_columns(found.workers)
    if "partitions" in columns:
        click.echo()
        show_table(False, found.workers, columns, "")
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
