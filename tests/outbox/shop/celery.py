"""The Celery app, and its tasks."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from tests.outbox.shop.killing import kill_when_asked

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.outbox.shop.settings")
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
kill_when_asked()


@app.task(name="notify", tenant="{merchant}")
def notify(merchant: str, number: int) -> None:
    """Write the number to a file, in one write."""
    with open(os.environ["SHOP_RAN"], "a", encoding="utf-8") as ran:
        ran.write(f"{merchant} {number}\n")


@app.task(name="report", outbox=False)
def report(number: int) -> None:
    """Do nothing."""


@app.task(name="resize", dedup={"key": "{number}", "timeout": 60})
def resize(number: int) -> None:
    """Do nothing."""


@app.task(name="order_in_task", bind=True, max_retries=1)
def order_in_task(task: Any, number: int, retries: bool) -> None:
    """Order, and call a task, in a transaction inside of a task."""
    from django.db import transaction

    from tests.outbox.shop.models import Order

    with transaction.atomic():
        Order.objects.create(number=number + task.request.retries)
        notify.delay("in task", number + task.request.retries)
        if retries and not task.request.retries:
            raise task.retry(countdown=0)
