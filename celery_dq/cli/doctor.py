"""``celery dq doctor``: check the set-up."""

from __future__ import annotations

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.checks.doctor import check_server, check_settings
from celery_dq.cli.output import command, show


@click.command()
@command
def doctor(dq: DQ, as_json: bool) -> None:
    """Check the settings, the tasks' tenants, and the server. Exit status 1: an error was found."""
    app = click.get_current_context().obj.app
    app.loader.import_default_modules()  # the tasks that a worker imports
    findings = [*check_settings(app), *check_server(app)]
    lines = [f"{each.level.upper():8}{each.problem} {each.remedy}".rstrip() for each in findings]
    show(as_json, findings, "\n".join(lines))
    if any(each.level == "error" for each in findings):
        raise SystemExit(1)
