"""The orders."""

from __future__ import annotations

import os
from typing import Any

from django.db import models
from django.db.models.signals import post_delete, post_save


class Order(models.Model):
    """An order, in whose transaction a task is called."""

    number: models.IntegerField[int, int] = models.IntegerField(unique=True)


def index(sender: type[models.Model], **kwargs: Any) -> None:
    """Call a task for each object of any model, as an index of all models does."""
    from tests.outbox.shop.celery import notify

    notify.delay(sender.__name__, 0)


if os.environ.get("SHOP_RECEIVER"):
    post_save.connect(index)
    post_delete.connect(index)
