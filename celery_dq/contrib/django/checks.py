"""System checks: ``manage.py check``; with ``--deploy`` also what needs the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks

from celery_dq.app.doctor import Finding, check_server, check_settings
from celery_dq.contrib.django.conf import project_app

#: ``manage.py check --tag celery_dq``
TAG = "celery_dq"


@checks.register(TAG)
def settings_are_valid(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """The ``dq_*`` settings, the broker's scheme, the tenant templates of the tasks: opens nothing."""
    app = project_app()
    # The tasks modules of the installed apps; all that a worker imports would run the checks again.
    app.autodiscover_tasks(force=True)
    return _messages(check_settings(app))


@checks.register(TAG, deploy=True)
def server_is_fit(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """The Redis server's version and eviction policy."""
    return _messages(check_server(project_app()))


def _messages(findings: Sequence[Finding]) -> list[checks.CheckMessage]:
    kinds = {"error": checks.Error, "warning": checks.Warning}
    return [
        kinds[finding.level](finding.problem, hint=finding.remedy, id=f"celery_dq.{finding.code}")
        for finding in findings
        if finding.level != "ok"
    ]
