"""``celery dq …`` in the process of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_dq.cli import dq

#: Runs a command, and returns its output.
Run = Callable[..., str]


def run_dq(
    app: Any,
    *words: str,
    status: int | None = 0,
    answer: str | None = None,
    columns: int = 80,
    charset: str = "utf-8",
) -> Result:
    """Run a command, which may be one text with blanks. A traceback or another status fails the test.

    Args:
        status: The expected exit status; None for any.
        answer: The standard input.
        columns: The width of the terminal.
        charset: The encoding of the standard output.
    """
    line = words[0].split() if len(words) == 1 else words
    context = CLIContext(app=app, no_color=True, workdir=None)
    result = CliRunner(charset, env={"COLUMNS": str(columns)}).invoke(dq, line, obj=context, input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert status in (None, result.exit_code), result.output
    return result
