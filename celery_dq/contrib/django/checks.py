"""System checks: ``manage.py check``; with ``--deploy`` also what needs the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register

from celery_dq.app.doctor import Finding, check_server, check_settings
from celery_dq.contrib.django.conf import project_app

#: ``manage.py check --tag celery_dq``
TAG = "celery_dq"


@register(TAG, Tags.compatibility)
def settings_are_valid(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """The ``dq_*`` settings, the broker's scheme, the tenant templates of the tasks: opens nothing."""
    return _messages(check_settings(project_app()))


@register(TAG, Tags.compatibility, deploy=True)
def server_is_fit(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """The Redis server's version and eviction policy."""
    return _messages(check_server(project_app()))


def _messages(findings: Sequence[Finding]) -> list[CheckMessage]:
    kinds = {"error": Error, "warning": Warning}
    return [
        kinds[finding.level](finding.problem, hint=finding.remedy, id=f"celery_dq.{finding.code}")
        for finding in findings
        if finding.level != "ok"
    ]
