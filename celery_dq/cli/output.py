"""The parts that all subcommands share: ``--json``, output, and errors."""

from __future__ import annotations

import codecs
import errno
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from io import TextIOWrapper
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any
from unicodedata import combining, east_asian_width

import click
import redis
from celery.bin.base import handle_preload_options
from kombu.exceptions import OperationalError

from celery_dq.app.api.api import dq_of
from celery_dq.app.checks.finding import WAIT_FOR_SLOT, slot_moves
from celery_dq.errors import ConfigurationError, DQError
from celery_dq.inspector.redis_values import MOST
from celery_dq.shown import plain, shown_json, shown_name
from celery_dq.transport.redis.store.server_checks import refuses_login

#: The part of an error in JSON that has the outcomes before it.
_DONE = f"{__name__}.done"
#: How the standard output writes the characters that its encoding lacks.
_ESCAPE = "celery_dq.escape"


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Return escapes in the place of such characters. They are those of JSON, so that a program reads it."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


class ErrorsAsJson(click.Group):
    """A group whose commands print an error as JSON, too, if --json is among their words.

    No name fails for the encoding of the terminal: the error would come after the change.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click; remember whether JSON is wanted."""
        ctx.meta[__name__] = "--json" in args
        if isinstance(sys.stdout, TextIOWrapper):
            codecs.register_error(_ESCAPE, _escaped)
            sys.stdout.reconfigure(errors=_ESCAPE)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error of the user or a server becomes an object on the standard output."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort) as exc:
            if not ctx.meta[__name__]:
                raise
            kind = type(exc.__cause__ or exc).__name__
            message = exc.format_message() if isinstance(exc, click.ClickException) else "Nothing was changed"
            show(True, {"error": message, "type": kind, **ctx.meta.get(_DONE, {})})
            ctx.exit(exc.exit_code if isinstance(exc, click.ClickException) else 1)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a click callback: add ``--json``, pass ``app.dq``, and turn errors into one line.

    Args:
        function: The callback, which takes ``(dq, as_json, …)``.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    @click.pass_context
    @handle_preload_options
    @wraps(function)
    def run(context: click.Context, **options: Any) -> None:
        try:
            dq = dq_of(context.obj.app)
            with dq.audit.through("celery dq"):
                function(dq, **options)
        except DQError as exc:
            # An error of the user or a server needs no traceback. The exit status is 1.
            raise click.ClickException(shown_name(str(exc) or type(exc).__name__)) from exc
        except (OperationalError, redis.ConnectionError, redis.TimeoutError, OSError) as exc:
            if isinstance(exc, BrokenPipeError):
                raise  # click ends without a word: the reader of the output has gone
            if getattr(exc, "filename", None) or getattr(exc, "errno", None) == errno.ENOSPC:
                raise click.ClickException(f"A file cannot be used: {exc}") from exc
            reason = str(exc) or type(exc).__name__
            if slot_moves(exc):
                raise click.ClickException(f"The broker cannot be read: {reason}. {WAIT_FOR_SLOT}") from exc
            if refuses_login(exc):
                raise click.ClickException(reason) from exc
            raise click.ClickException(
                f"The server cannot be reached or used: {reason.rstrip('.')}. Start it, or correct its URL; "
                "'celery dq doctor' checks all servers."
            ) from exc
        except redis.exceptions.NoPermissionError as exc:
            raise click.ClickException(
                f"The Redis user of broker_url lacks a right: {exc}. The guide 'Operating' lists the rights "
                f"of "
                "the role 'operator'."
            ) from exc
        except redis.RedisError as exc:
            raise click.ClickException(f"Redis refuses the request: {exc}") from exc
        except ImportError as exc:
            raise click.ClickException(f"A library or a module is missing: {exc}.") from exc

    return run


#: Type of an option that gives a number of rows.
COUNT = click.IntRange(1, MOST)


def explain_configuration_errors() -> None:
    """Let every ``celery`` command end with one line, not a traceback, when a setting cannot be used.

    A program that only embeds Celery, such as by ``app.worker_main()``, loads this module too. It keeps its
    tracebacks, and so does a program that has set a hook of its own.
    """
    program = Path(sys.argv[0])
    # `celery`, its .exe, or the __main__.py of `python -m celery`.
    if "celery" not in (program.stem, program.parent.name) or sys.excepthook is not sys.__excepthook__:
        return
    show_traceback = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, ConfigurationError):
            print_line(f"Error: {error}", err=True)
        else:
            show_traceback(kind, error, traceback)

    sys.excepthook = explain


def show(as_json: bool, data: Any, text: str | Sequence[str] = ()) -> None:
    """Print `data` as JSON, or a line of text, or several."""
    if as_json:
        click.echo(shown_json(plain(data)))
    else:
        click.echo("\n".join(map(shown_name, [text] if isinstance(text, str) else text)))


def print_line(text: str, *, err: bool = False) -> None:
    """Print one line, in which a name from a message cannot begin another one."""
    click.echo(shown_name(text), err=err)


def show_before_error(as_json: bool, data: Any, text: str | Sequence[str]) -> None:
    """Print what was done before an error; in JSON it is ``done`` in the object of the error."""
    if as_json:
        click.get_current_context().meta[_DONE] = {"done": data}
    else:
        show(False, data, text)


def show_table(as_json: bool, rows: Sequence[Any], columns: Iterable[str], nothing: str) -> None:
    """Print dataclasses as JSON, or as a table.

    Args:
        as_json: Whether to print JSON.
        rows: The dataclasses.
        columns: Attributes that are the columns of the table, if the rows have them; those of a part with
            the name of the part, such as ``service.rate``.
        nothing: Text to print instead of an empty table.
    """
    if as_json:
        show(True, rows)
        return
    if not rows:
        print_line(nothing)
        return
    names = [name for name in columns if hasattr(rows[0], name.partition(".")[0])]
    heads = [name.rpartition(".")[2] for name in names]
    cells = [heads, *([cell(attrgetter(name)(row)) for name in names] for row in rows)]
    widths = [max(_columns(line[place]) for line in cells) for place in range(len(names))]
    for line in cells:
        padded = (text + " " * (width - _columns(text)) for text, width in zip(line, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: two of a wide character, 0 of a combining one."""
    return sum(0 if combining(each) else 2 if east_asian_width(each) in ("W", "F") else 1 for each in text)


def cell(value: Any) -> str:
    """Return a value as the text of a cell, without unprintable characters."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    if isinstance(value, tuple):
        return str(len(value))
    return shown_name(value)
