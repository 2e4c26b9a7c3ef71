"""``celery dq doctor``: check the set-up."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.checks.doctor import check_server, check_settings
from celery_dq.app.checks.finding import Finding
from celery_dq.cli.output import command, show


@click.command()
@click.option("--watch", is_flag=True, help="Check again and again, and show changes, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=30.0,
    show_default=True,
    help="Seconds between two checks of --watch.",
)
@command
def doctor(dq: DQ, as_json: bool, watch: bool, interval: float) -> None:
    """Check the settings, the tasks' tenants, and the server. Exit status 1: an error was found."""
    app = click.get_current_context().obj.app
    app.loader.import_default_modules()  # the tasks that a worker imports
    findings = _check(app)
    show(as_json, findings, [line_of(each) for each in findings])
    try:
        while watch:
            time.sleep(interval)
            before, findings = findings, _check(app)
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
        for each in found:
            if each.level != "ok" and each not in others:
                at = datetime.now().astimezone().isoformat(timespec="seconds")
                data = {"at": at, "is_over": sign == "-", "finding": each}
                show(as_json, data, f"{at} {sign} {line_of(each)}")


def line_of(finding: Finding) -> str:
    """Return the line of a finding; the code of a problem leads to the table in the documentation."""
    problem = finding.problem if finding.problem.endswith((".", "?")) else f"{finding.problem}."
    text = f"{finding.level.upper():8}{problem} {finding.remedy}".rstrip()
    return text if finding.level == "ok" else f"{text} ({finding.code})"
