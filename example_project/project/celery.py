"""The Celery app of the shop, configured from Django's settings (names that start with ``CELERY_``)."""

from __future__ import annotations

import os
from pathlib import Path

from celery import Celery
from celery.signals import worker_ready

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
app.autodiscover_tasks(related_name="ledger")


@worker_ready.connect
def announce(**_: object) -> None:
    """Create the file that the environment names, as a sign that this worker consumes."""
    if path := os.environ.get("SHOP_READY_FILE"):
        Path(path).touch()
