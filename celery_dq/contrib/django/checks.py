"""System checks for ``manage.py check``; those that need the server run with ``--deploy`` only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks

from celery_dq.app.checks.doctor import check_server, check_settings
from celery_dq.app.checks.finding import Finding
from celery_dq.contrib.django.conf import project_app

#: Tag of the checks, for ``manage.py check --tag celery_dq``.
TAG = "celery_dq"


@checks.register(TAG)
def settings_are_valid(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the ``dq_*`` settings, the broker's scheme, and the tenant templates. Opens no connection."""
    app = project_app()
    # Only the tasks modules of the installed apps. A full import, as in a worker, would run the checks again.
    app.autodiscover_tasks(force=True)
    return _messages(check_settings(app))


@checks.register(TAG, deploy=True)
def server_is_fit(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the version and the eviction policy of the Redis server."""
    return _messages(check_server(project_app()))


def _messages(findings: Sequence[Finding]) -> list[checks.CheckMessage]:
    kinds = {"error": checks.Error, "warning": checks.Warning}
    return [
        kinds[finding.level](finding.problem, hint=finding.remedy, id=f"celery_dq.{finding.code}")
        for finding in findings
        if finding.level != "ok"
    ]
