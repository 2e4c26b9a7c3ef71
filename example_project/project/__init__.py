"""The Django project: settings, Celery app, URLs."""

from __future__ import annotations

from project.celery import app as celery_app

__all__ = ["celery_app"]
