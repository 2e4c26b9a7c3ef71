"""``celery dq alive`` and ``ready``: probes of the worker on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show
from celery_dq.errors import ConfigurationError
from celery_dq.probe import WITHIN_S, Question, ask_probe

_FILE = click.argument("file", required=False, type=click.Path(path_type=Path))
_WITHIN = click.option(
    "--within",
    default=WITHIN_S,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for which the main loop may be silent.",
)


@click.command()
@_FILE
@_WITHIN
@command
def alive(dq: DQ, as_json: bool, file: Path | None, within: float) -> None:
    """Say whether the worker that keeps FILE (default: dq_probe_file) turns its main loop, connects or stops.

    Asks neither broker nor worker. python -m celery_dq.probe alive FILE does the same without the app.

    Exit status 1: it does not.
    """
    _ask("alive", dq, as_json, file, within)


@click.command()
@_FILE
@_WITHIN
@command
def ready(dq: DQ, as_json: bool, file: Path | None, within: float) -> None:
    """Say whether the worker that keeps FILE (default: dq_probe_file) consumes, and its broker answers.

    Asks neither broker nor worker. python -m celery_dq.probe ready FILE does the same without the app.

    Exit status 1: it does not.
    """
    _ask("ready", dq, as_json, file, within)


def _ask(question: Question, dq: DQ, as_json: bool, file: Path | None, within_s: float) -> None:
    setting = dq.options.probe_file
    if file is None and (not setting or "%" in setting):
        raise ConfigurationError(
            f"dq_probe_file = {setting!r} names no single file: give FILE, or set dq_probe_file"
        )
    answer = ask_probe(question, file or Path(setting), within_s=within_s)
    show(as_json, answer, answer.reason)
    if not answer.ok:
        raise SystemExit(1)
