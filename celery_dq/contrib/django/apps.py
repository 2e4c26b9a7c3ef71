"""The Django app: finds the project's Celery app, sets it up, and registers the system checks.

Those that ask the servers run with ``manage.py check --deploy`` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from celery.utils.imports import symbol_by_name
from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from celery_dq.app.api.api import dq_of
from celery_dq.app.checks.doctor import check_server, check_settings
from celery_dq.app.checks.finding import Finding
from celery_dq.compat.celery_calls import current_app_if_any
from celery_dq.contrib.django.dashboard.broker_reads import BrokerReads
from celery_dq.contrib.django.dashboard.history import Sampler
from celery_dq.errors import ConfigurationError
from celery_dq.per_process import PerProcess

#: Optional setting with the path of the app, such as ``"shop.celery:app"``.
APP_SETTING = "CELERY_DQ_APP"
#: The setting in which ``celery dq web`` keeps its app, which may be another one than the project's.
SERVED_APP = "DQ_WEB_APP"
#: Tag of the checks, for ``manage.py check --tag celery_dq``.
TAG = "celery_dq"


class CeleryDQConfig(AppConfig):
    """``INSTALLED_APPS += ["celery_dq.contrib.django"]``."""

    name = "celery_dq.contrib.django"
    label = "celery_dq"
    verbose_name = "Celery queues"
    #: The registry of the metrics view; a forked web worker makes its own.
    metrics_registry: PerProcess[Any]
    default_auto_field = "django.db.models.BigAutoField"
    #: The reads of the dashboard.
    reads: PerProcess[BrokerReads]
    #: The samples of queues for their history.
    sampler: PerProcess[Sampler]

    def ready(self) -> None:
        """Set the project's Celery app up, and register the system checks."""
        from celery_dq.wiring import setup

        app = project_app()
        setup(app)
        # Models can be imported from here on.
        from celery_dq.contrib.django.outbox.tables import DjangoOutbox

        outbox = dq_of(app).outbox
        outbox.tables = DjangoOutbox(lambda: outbox.options.max_rows)
        app.steps["consumer"].add("celery_dq.contrib.django.outbox.worker_step:OutboxRelayStep")
        checks.register(settings_are_valid, TAG)
        checks.register(server_is_fit, TAG, deploy=True)
        self.reads = PerProcess(BrokerReads)
        self.sampler = PerProcess(Sampler)
        self.metrics_registry = PerProcess(_make_registry)


def _make_registry() -> Any:
    # Only a project with the view needs prometheus-client.
    from celery_dq.metrics.collector import make_registry

    return make_registry(project_app())


def project_app() -> Any:
    """Return the Celery app of the project.

    The first of these is used: the app that ``celery dq web`` serves; the app that ``CELERY_DQ_APP`` names;
    the current app, which the project's ``__init__`` imports in the usual layout; ``app`` in the module
    ``celery`` beside the settings module.

    Raises:
        ImproperlyConfigured: There is no app, or the setting names another object.
    """
    served = getattr(settings, SERVED_APP, None)
    if served is not None:
        return served
    named = getattr(settings, APP_SETTING, None)
    if named:
        return _imported(str(named))
    # `celery.current_app` would create an app if there is none.
    app = current_app_if_any()
    if app is not None:
        return app
    package = (settings.SETTINGS_MODULE or "").rpartition(".")[0]
    if package:
        return _imported(f"{package}.celery:app")
    raise ImproperlyConfigured(
        f"celery_dq.contrib.django found no Celery app; set {APP_SETTING} = 'shop.celery:app', or import the"
        " app in the project's __init__.py as Celery's guide for Django shows"
    )


def _imported(path: str) -> Any:
    try:
        module, _, attribute = path.partition(":")
        import_module(module)
        app = symbol_by_name(f"{module}:{attribute or 'app'}")
    except (ImportError, AttributeError, ValueError) as exc:
        raise ImproperlyConfigured(
            f"celery_dq.contrib.django cannot import the Celery app {path!r} ({exc});"
            f" set {APP_SETTING} to 'module:attribute'"
        ) from exc
    if not hasattr(app, "send_task"):
        raise ImproperlyConfigured(f"{APP_SETTING} = {path!r} is a {type(app).__name__}, not a Celery app")
    return app


def settings_are_valid(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check ``dq_*`` settings, the broker's scheme, tenant templates, and outboxes. Opens no connection."""
    app = project_app()
    # Only the tasks modules of the installed apps. A full import, as in a worker, would run the checks again.
    app.autodiscover_tasks(force=True)
    return _messages([*check_settings(app), *_unknown_databases(app)])


def _unknown_databases(app: Any) -> Iterator[Finding]:
    """Yield a finding for each database of ``dq_outbox`` that the project does not have."""
    try:
        outbox = dq_of(app).options.outbox
    except ConfigurationError:
        return  # check_settings reports it
    known = [*connections]
    for name in outbox.databases:
        if name not in known:
            yield Finding(
                "E041",
                f"dq_outbox = {outbox.aliases!r} names {name!r}, and DATABASES has no such alias: it has "
                f"{', '.join(map(repr, known))}.",
                "Correct CELERY_DQ_OUTBOX, or add the database.",
            )


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
