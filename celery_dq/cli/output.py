"""How every subcommand takes ``--json``, prints, and fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any

import click
from celery.bin.base import handle_preload_options
from kombu.exceptions import OperationalError

from celery_dq.app.face import dq_of
from celery_dq.errors import DQError
from celery_dq.options import Quota


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Give a click callback ``--json``, and its first argument, ``app.dq``; turn errors into one line.

    The callback takes ``(dq, as_json, …)``.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    @click.pass_context
    @handle_preload_options
    @wraps(function)
    def run(context: click.Context, **options: Any) -> None:
        try:
            function(dq_of(context.obj.app), **options)
        except (DQError, OperationalError) as exc:
            # A server's or a user's mistake: no traceback, exit status 1.
            raise click.ClickException(str(exc) or type(exc).__name__) from exc

    return run


def show(as_json: bool, data: Any, text: str | None = None) -> None:
    """Print `data` as JSON, or `text`."""
    click.echo(json.dumps(_plain(data), indent=2, ensure_ascii=False) if as_json else text)


def show_table(as_json: bool, rows: Sequence[Any], columns: Iterable[str], nothing: str) -> None:
    """Print dataclasses as JSON, or those attributes of them that `columns` names as a table."""
    if as_json:
        show(True, rows)
        return
    if not rows:
        click.echo(nothing)
        return
    names = list(columns)
    cells = [names, *([_cell(getattr(row, name)) for name in names] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def spell(quota: Quota) -> str:
    """Return a quota in the words of ``celery dq quotas set``."""
    rate = "unlimited" if quota.rate is None else f"{quota.rate:g}/s"
    concurrency = "unlimited" if quota.concurrency is None else str(quota.concurrency)
    paused = " paused" if quota.paused else ""
    return f"rate={rate} burst={quota.burst:g} weight={quota.weight:g} concurrency={concurrency}{paused}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    if isinstance(value, Quota):
        return spell(value)
    if isinstance(value, tuple):
        return str(len(value))
    # Names come from outside: none may end the line or steer the terminal.
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(value))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Path) else value
