"""The permissions of the dashboard. There is no table."""

from __future__ import annotations

from typing import Any

from django.db import models

from celery_dq.contrib.django.dashboard.access import PERMISSIONS


class NoRows(models.Manager):  # type: ignore[type-arg]  # generic for type checkers only
    """Finds nothing, and asks no database: ``dumpdata`` and the admin read every model."""

    def get_queryset(self) -> Any:
        """Return a query that is not sent."""
        return super().get_queryset().none()


class Dashboard(models.Model):
    """A model without a table: Django keeps permissions by model."""

    objects = NoRows()

    class Meta:
        """Nothing is stored; ``manage.py migrate`` makes the permissions."""

        managed = False
        base_manager_name = "objects"
        default_permissions = ()
        permissions = PERMISSIONS
        verbose_name = "dashboard"
        verbose_name_plural = "dashboard"
