"""The subcommands that inspect buffered messages on disk, and send those of dead processes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.api.audit import OnProgress
from celery_dq.app.api.buffer import QuarantinedFile
from celery_dq.cli.arguments import nearest, seconds_option
from celery_dq.cli.bulk import INTERRUPTED, bulk, change_each, change_many, confirm, counted
from celery_dq.cli.output import command, print_line, show, show_table
from celery_dq.errors import ConfigurationError, InvalidRequest

_COLUMNS = ("name", "state", "pending", "bytes", "age_s", "damaged")
_FILE_COLUMNS = ("name", "at", "bytes", "messages", "problem")
_MESSAGE_COLUMNS = ("id", "queue", "task", "tenant", "bytes")
#: Seconds between two checks while `replay` waits.
LOOK_S = 0.05


class _ListByDefault(click.Group):
    """A group whose words without a command, with or without --json, are those of its command ``list``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click. The shell completes the commands of the group all the same."""
        if {*args} <= {"--json"} and not ctx.resilient_parsing:
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def spill() -> None:
    """Inspect and replay the buffer's messages on disk. Without a subcommand: list."""


@spill.command(name="list")
@command
def list_(dq: DQ, as_json: bool) -> None:
    """List the processes with messages in dq_buffer_folder, with count, size and age."""
    spills = dq.buffer.spill()
    if as_json:
        show(True, spills)
        return
    if spills.folder is None:
        raise ConfigurationError(
            "dq_buffer_folder is not set, so no buffered message is on disk: set it to keep messages there"
        )
    # A file counts until its last message is delivered.
    counts = f"{spills.pending} pending or already delivered, {spills.bytes} bytes"
    print_line(f"{spills.folder}: {counts}, oldest {spills.age_s:.1f} s")
    owners = [replace(each, age_s=round(each.age_s, 1)) for each in spills.owners]
    show_table(False, owners, _COLUMNS, "No process has a folder there.")
    for path in spills.quarantined:
        print_line(f"quarantined: {path} ({path.stat().st_size} bytes)")


@spill.group(cls=_ListByDefault)
def quarantine() -> None:
    """Messages that the broker refused, and damaged files. Without a subcommand: list."""


@quarantine.command("list")
@command
def quarantine_list(dq: DQ, as_json: bool) -> None:
    """List the files in the quarantine, the oldest first."""
    show_table(as_json, _quarantined(dq), _FILE_COLUMNS, "Nothing is in the quarantine.")


@quarantine.command("show")
@click.argument("name")
@command
def quarantine_show(dq: DQ, as_json: bool, name: str) -> None:
    """Show the messages of the file NAME, as far as they can be read."""
    found = _chosen(dq, (name,), everything=False)[0]
    if as_json:
        show(True, found)
        return
    show_table(False, found.messages, _MESSAGE_COLUMNS, "No message in it can be read.")
    if found.problem:
        print_line(f"The rest cannot be read: {found.problem}.")


@quarantine.command("replay")
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All files.")
@bulk
@command
def quarantine_replay(
    dq: DQ, as_json: bool, names: tuple[str, ...], everything: bool, dry_run: bool, yes: bool
) -> None:
    """Send the readable messages of the files NAMES, or of all files. Only what cannot be read is kept."""
    chosen = _chosen(dq, names, everything)
    if everything:
        chosen = [each for each in chosen if each.messages]

    def send(*, dry_run: bool, on_progress: OnProgress) -> int:
        sent = 0
        for each in chosen:
            sent += len(each.messages) if dry_run else dq.buffer.replay_quarantined(each.name)
            on_progress(sent)
        return sent

    question = f"Send {{}} of {counted(len(chosen), 'file')}?"
    change_many(as_json, send, word="sent", question=question, dry_run=dry_run, yes=yes)


@quarantine.command("rm")
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All files.")
@bulk
@command
def quarantine_remove(
    dq: DQ, as_json: bool, names: tuple[str, ...], everything: bool, dry_run: bool, yes: bool
) -> None:
    """Remove the files NAMES, with their messages."""
    chosen = _chosen(dq, names, everything)
    messages = {each.name: len(each.messages) for each in chosen}

    def files(removed: Iterable[str]) -> str:
        counts = [messages[name] for name in removed]
        return f"{counted(len(counts), 'file')} with {counted(sum(counts), 'readable message')}"

    if dry_run:
        text = f"{files(messages)} would be removed; none was."
        show(as_json, {"found": len(chosen), "removed": 0}, text)
        return
    if chosen and not yes:
        confirm(f"Remove {files(messages)} for good?")
    change_each(
        as_json,
        messages,
        dq.buffer.remove_quarantined,
        lambda removed: ({"removed": len(removed)}, f"Removed {files(removed)}."),
        word="removed",
        noun="file",
    )


def _quarantined(dq: DQ) -> list[QuarantinedFile]:
    if dq.buffer.folder is None:
        raise ConfigurationError("dq_buffer_folder is not set, so there is no quarantine")
    return dq.buffer.quarantine()


def _chosen(dq: DQ, names: tuple[str, ...], everything: bool) -> list[QuarantinedFile]:
    """Return the named files, or all."""
    if bool(names) == everything:
        raise click.UsageError("Give either NAMES or --all.")
    found = {each.name: each for each in _quarantined(dq)}
    for name in names:
        if name not in found:
            listed = nearest(name, found) or " 'celery dq spill quarantine list' shows all."
            raise InvalidRequest(f"No file {name!r} is in the quarantine.{listed}")
    return [found[name] for name in dict.fromkeys(names)] if names else list(found.values())


@spill.command()
@seconds_option("--timeout", 60.0, "Seconds to wait for the broker.", click.FloatRange(0))
@bulk
@command
def replay(dq: DQ, as_json: bool, timeout: float, dry_run: bool, yes: bool) -> None:
    """Send the messages of dead processes, oldest first, and wait. Exit status 1: some are left."""
    if dq.buffer.folder is None:
        raise ConfigurationError("dq_buffer_folder is not set, so there is no message to replay")
    before = dq.buffer.spill()
    orphans = {owner.name for owner in before.owners if owner.state == "dead"}
    pending = sum(owner.pending for owner in before.owners if owner.name in orphans)
    if dry_run:
        text = f"{counted(pending, 'message')} would be sent; none was."
        show(as_json, {"found": pending, "sent": 0}, text)
        return
    if orphans and not yes:
        confirm(f"Send {counted(pending, 'message')} of {counted(len(orphans), 'dead process')}?")
    deadline = time.monotonic() + timeout
    is_interrupted = False
    if orphans:
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
    if left:
        raise click.exceptions.Exit(1)
