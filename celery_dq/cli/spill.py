"""The subcommands that inspect buffered messages on disk, and send those of dead processes."""

from __future__ import annotations

import time

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.bulk import INTERRUPTED, bulk, confirm, counted
from celery_dq.cli.output import command, show, show_table
from celery_dq.errors import ConfigurationError

_COLUMNS = ("name", "state", "pending", "bytes", "age_s", "damaged")
#: Seconds between two checks while `replay` waits.
LOOK_S = 0.05


@click.group(invoke_without_command=True)
@click.pass_context
def spill(context: click.Context) -> None:
    """Inspect and replay the buffer's messages on disk. Without a subcommand: list."""
    if context.invoked_subcommand is None:
        context.invoke(list_)


@spill.command(name="list")
@command
def list_(dq: DQ, as_json: bool) -> None:
    """List the processes with messages in dq_buffer_folder, with count, size and age."""
    found = dq.buffer.spill()
    if as_json:
        show(True, found)
        return
    if found.folder is None:
        raise ConfigurationError(
            "dq_buffer_folder is not set, so no buffered message is on disk: set it to keep messages there"
        )
    click.echo(f"{found.folder}: {found.pending} pending, {found.bytes} bytes, oldest {found.age_s:.1f} s")
    show_table(False, found.owners, _COLUMNS, "No process has a folder there.")
    for path in found.quarantined:
        click.echo(f"quarantined: {path} ({path.stat().st_size} bytes)")


@spill.command()
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the broker.",
)
@bulk
@command
def replay(dq: DQ, as_json: bool, timeout: float, dry_run: bool, yes: bool) -> None:
    """Send the messages of dead processes, oldest first, and wait. Exit status 1: some are left."""
    if dq.buffer.folder is None:
        raise ConfigurationError("dq_buffer_folder is not set, so there is no message to replay")
    before = dq.buffer.spill()
    orphans = {owner.name for owner in before.owners if owner.state == "dead"}
    pending = sum(owner.pending for owner in before.owners if owner.name in orphans)
    if orphans and not (dry_run or yes):
        confirm(f"Send {counted(pending, 'message')} of {counted(len(orphans), 'dead process')}?")
    deadline = time.monotonic() + timeout
    is_interrupted = False
    if orphans and not dry_run:
        try:
            dq.buffer.replay()
            while orphans & set(dq.buffer.inspect().owners) and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            is_interrupted = True
        dq.buffer.close(0.5 if is_interrupted else max(deadline - time.monotonic(), 0.5))
    after = dq.buffer.spill()
    left = sum(owner.pending for owner in after.owners if owner.name in orphans)
    sent = pending - left
    begin = "Interrupted: " if is_interrupted else ""
    show(as_json, {"sent": sent, "left": left}, f"{begin}{sent} sent, {left} left.")
    if is_interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    if left and not dry_run:
        raise click.exceptions.Exit(1)
