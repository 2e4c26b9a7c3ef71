"""The Django app: calls ``celery_dq.setup`` when the project is ready."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig

from celery_dq.contrib.django.dashboard.broker_reads import BrokerReads
from celery_dq.contrib.django.dashboard.sampler import Sampler
from celery_dq.per_process import PerProcess


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
        from celery_dq.contrib.django import checks  # noqa: F401 - registers itself
        from celery_dq.contrib.django.conf import project_app
        from celery_dq.wiring import setup

        setup(project_app())
        self.reads = PerProcess(BrokerReads)
        self.sampler = PerProcess(Sampler)
        self.metrics_registry = PerProcess(_make_registry)


def _make_registry() -> Any:
    # Only a project with the view needs prometheus-client.
    from celery_dq.contrib.django.conf import project_app
    from celery_dq.metrics.collector import make_registry

    return make_registry(project_app())
