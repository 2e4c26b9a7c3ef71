"""``celery dq migrate``: move waiting messages from kombu's Redis transport to the tenant broker, or back."""

from __future__ import annotations

from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.api.migration import MigrationOptions, MigrationReport
from celery_dq.app.api.return_migration import ReturnMigration
from celery_dq.cli.arguments import read_json
from celery_dq.cli.bulk import bulk, confirm, counted, reported_progress
from celery_dq.cli.output import command, print_line, show, show_table
from celery_dq.migration.stock_broker import Priorities

_COLUMNS = ("queue", "waiting", "priorities", "unacked", "staged", "left", "migrated")
#: Messages that stay, of which the text output shows the reasons.
_SHOWN = 20


@click.command()
@click.argument("source")
@click.argument("target", required=False)
@click.option("--queues", help="Only these queues, separated by commas.")
@click.option(
    "--priorities",
    type=click.Choice(["inverted", "same"]),
    help="inverted: keep the order, so that 0 becomes 9. same: keep the numbers.",
)
@click.option(
    "--take-unacked",
    is_flag=True,
    help="Also take the messages that live workers hold. A task that such a worker runs will run twice.",
)
@click.option(
    "--stock-options",
    help='broker_transport_options of the stock broker as JSON, such as \'{"global_keyprefix": "shop:"}\'.',
)
@bulk
@command
def migrate(
    dq: DQ,
    as_json: bool,
    source: str,
    target: str | None,
    queues: str | None,
    priorities: Priorities | None,
    take_unacked: bool,
    stock_options: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Move the messages of SOURCE (redis://…) to TARGET (dq-redis://…; default: the broker of the app).

    SOURCE and TARGET may be exchanged, to roll back. The same command completes an interrupted run. No
    message is lost or doubled. Messages that no worker could decode stay in SOURCE, and so do those that live
    workers hold.

    Exit status 1: some messages stay, or an error. --dry-run reads every message and takes none.
    """
    options = MigrationOptions(
        tuple(name.strip() for name in (queues or "").split(",") if name.strip()),
        priorities,
        take_unacked,
        _read_options(stock_options),
    )
    with dq.migration(source, target, options) as migration:
        report = migration.survey(read=dry_run)
        if not dry_run and report.found:
            if not yes:
                confirm(f"Move {counted(report.found, 'message')} of {counted(len(report.queues), 'queue')}?")
            with reported_progress(as_json, "migrated", "message", report.found) as on_progress:
                report = migration.run(on_progress)
        is_return = isinstance(migration, ReturnMigration)
    _show(as_json, report, dry_run, is_return)
    if not report.is_complete:
        raise SystemExit(1)


def _read_options(given: str | None) -> dict[str, Any]:
    options = {} if given is None else read_json("stock-options", given)
    if not isinstance(options, dict):
        raise click.BadParameter(f"{given!r} is not a JSON object", param_hint="--stock-options")
    return options


def _show(as_json: bool, report: MigrationReport, dry_run: bool, is_return: bool) -> None:
    if as_json:
        show(True, {**vars(report), "found": report.found, "migrated": report.migrated})
        return
    show_table(False, report.queues, _COLUMNS, "No message waits on the source.")
    if dry_run:
        print_line(f"{counted(report.found, 'message')} would be migrated; none was.")
        if report.undecided:
            print_line(_UNDECIDED.format(", ".join(report.undecided)))
    elif report.queues:
        print_line(f"Migrated {report.migrated:,}.")
    for each in report.left[:_SHOWN]:
        print_line(": ".join(filter(None, (f"Stays in {each.place}", each.reason, each.start))))
    if len(report.left) > _SHOWN:
        print_line(f"{len(report.left) - _SHOWN:,} more stay; --json lists them all.")
    if report.held_by:
        text = _HELD if is_return else _UNACKED
        print_line(text.format(", ".join(report.held_by)))


_UNDECIDED = (
    "These queues have messages with priorities: {}. Stock Redis serves priority 0 first, celery-dq serves 9 "
    "first. The migration needs --priorities inverted if your code inverts them from now on, too, or "
    "--priorities same to keep the numbers."
)
#: The text for messages that workers hold, by the direction of the migration.
_HELD = (
    "In-flight messages stay, because workers hold them: {}. Stop these workers (TERM; they return their "
    "unstarted messages), and run the command again. Messages of killed workers wait again when the lease is "
    "over (dq_lease)."
)
_UNACKED = (
    "Unacknowledged messages stay, because stock workers seem to live: {}. Stop these workers (TERM; they "
    "return their messages), and run the command again. --take-unacked takes the messages from live workers, "
    "and a task that such a worker runs will run twice."
)
