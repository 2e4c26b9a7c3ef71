"""The Django app: calls ``celery_dq.setup`` when the project is ready."""

from __future__ import annotations

from django.apps import AppConfig


class CeleryDQConfig(AppConfig):
    """``INSTALLED_APPS += ["celery_dq.contrib.django"]``."""

    name = "celery_dq.contrib.django"
    label = "celery_dq"
    verbose_name = "Celery queues"

    def ready(self) -> None:
        """Set the project's Celery app up, and register the system checks."""
        from celery_dq.contrib.django import checks  # noqa: F401 - registers itself
        from celery_dq.contrib.django.conf import project_app
        from celery_dq.wiring import setup

        setup(project_app())
