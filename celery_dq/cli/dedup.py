"""The subcommands that list and release dedup locks."""

from __future__ import annotations

from typing import TextIO

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.arguments import nearest, require_queue
from celery_dq.cli.bulk import bulk, confirm
from celery_dq.cli.output import COUNT, command, show, show_table
from celery_dq.dedup.repetition import repetition as measure

_COLUMNS = ("tenant", "key", "running", "age_s", "head", "heir", "tail", "followers", "token")


@click.group()
def dedup() -> None:
    """Dedup: list and release locks, count verdicts, measure repetition."""


@dedup.command(name="list")
@click.argument("queue")
@click.option("--limit", default=50, show_default=True, type=COUNT, help="Keys to show.")
@command
def list_(dq: DQ, as_json: bool, queue: str, limit: int) -> None:
    """List the dedup locks of QUEUE."""
    require_queue(queue, dq.dedup)
    show_table(as_json, dq.dedup[queue].list(limit), _COLUMNS, f"No dedup lock is held in {queue!r}.")


@dedup.command()
@click.argument("queue")
@click.argument("key")
@click.option("--tenant", default="", help="Tenant of the key.")
@bulk
@command
def release(dq: DQ, as_json: bool, queue: str, key: str, tenant: str, dry_run: bool, yes: bool) -> None:
    """Release the dedup lock of KEY, so that the next waiting call runs.

    A run that held the lock continues without it. Exit status 1: no task holds the lock.
    """
    require_queue(queue, dq.dedup)
    found = dq.dedup[queue].inspect(key, tenant=tenant)
    if found is not None and dry_run:
        show(
            as_json, {"found": found.head, "released": None}, f"Task {found.head} would lose the dedup lock."
        )
        return
    if found is not None and not yes:
        beside = " It runs, and the next call of the key would run beside it." if found.running else ""
        confirm(f"Task {found.head} holds the dedup lock.{beside} Release the lock?")
    head = None if dry_run else dq.dedup[queue].release(key, tenant=tenant)
    text = f"Task {head} no longer holds the dedup lock."
    if head is None:
        held = [each.key for each in dq.dedup[queue].list(1_000) if each.tenant == tenant]
        whose = f" of tenant {tenant!r}" if tenant else ""
        text = f"No task holds the dedup lock {key!r}{whose} in {queue!r}.{nearest(key, held)}"
    show(as_json, {"released": head}, text)
    if head is None:
        raise SystemExit(1)


@dedup.command()
@click.argument("queue")
@command
def verdicts(dq: DQ, as_json: bool, queue: str) -> None:
    """Show how often each verdict was given in QUEUE, and how many runs were evicted."""
    require_queue(queue, dq.dedup)
    found = dq.dedup[queue].verdicts()
    lines = [f"{name:<8} {count:>12,}" for name, count in sorted(found.items())]
    show(as_json, found, lines or f"No call to {queue!r} had a dedup key.")


@dedup.command()
@click.argument("queue", required=False)
@click.option(
    "--log",
    type=click.File(encoding="utf-8"),
    help="Read the calls from a file instead, one dedup key a line, the oldest first; - is stdin.",
)
@click.option("--consumers", required=True, type=COUNT, help="Tasks that run at a time.")
@click.option("--sample", default=1_000, show_default=True, type=COUNT, help="Waiting messages to read.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the distances into a PNG or SVG file.")
@command
def repetition(
    dq: DQ,
    as_json: bool,
    queue: str | None,
    log: TextIO | None,
    consumers: int,
    sample: int,
    plot: str | None,
) -> None:
    """Measure how much calls repeat each other: the waiting ones of QUEUE, or those of a log.

    A log serves on every broker, and before dedup is used: its keys may be anything that names equal calls.
    """
    if (queue is None) == (log is None):
        raise click.UsageError("Give either QUEUE or --log.")
    if log is not None:
        try:
            found = measure((line.rstrip("\r\n") for line in log if line.strip()), consumers)
        except UnicodeDecodeError as exc:
            raise click.BadParameter(f"{log.name} is not UTF-8: {exc}", param_hint="--log") from exc
    else:
        require_queue(str(queue), dq.dedup)
        found = dq.dedup[str(queue)].repetition(consumers, sample=sample)
    if plot is not None:
        try:
            found.plot(plot)
        except ValueError as exc:  # matplotlib does not support this file extension
            raise click.BadParameter(f"{plot}: {exc}", param_hint="--plot") from exc
    show(as_json, found, f"{found.kind.value}: {found.advice}")
