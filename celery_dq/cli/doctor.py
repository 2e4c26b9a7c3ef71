"""``celery dq doctor``: check the set-up."""

from __future__ import annotations

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.checks.doctor import check_server, check_settings
from celery_dq.app.checks.finding import Finding
from celery_dq.cli.output import command, show


@click.command()
@command
def doctor(dq: DQ, as_json: bool) -> None:
    """Check the settings, the tasks' tenants, and the server. Exit status 1: an error was found."""
    app = click.get_current_context().obj.app
    app.loader.import_default_modules()  # the tasks that a worker imports
    findings = [*check_settings(app), *check_server(app)]
    show(as_json, findings, "\n".join(map(line_of, findings)))
    if any(each.level == "error" for each in findings):
        raise SystemExit(1)


def line_of(finding: Finding) -> str:
    """Return the line of a finding; the code of a problem leads to the table in the documentation."""
    problem = finding.problem if finding.problem.endswith((".", "?")) else f"{finding.problem}."
    text = f"{finding.level.upper():8}{problem} {finding.remedy}".rstrip()
    return text if finding.level == "ok" else f"{text} ({finding.code})"
