"""Django's tasks on celery-dq, by ``"BACKEND": "celery_dq.contrib.django.tasks.DqBackend"`` in ``TASKS``.

Celery's autodiscovery imports this module in every project with this app, also in those without
``django.tasks``, so the backend itself is in :mod:`.task_backend`.
"""

from __future__ import annotations

from typing import Any

from celery_dq.contrib.django.task_tenant import tenant

__all__ = ["tenant"]


def __getattr__(name: str) -> Any:
    if name == "DqBackend":
        from celery_dq.contrib.django.task_backend import DqBackend

        return DqBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
