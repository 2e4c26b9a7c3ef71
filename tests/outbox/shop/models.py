"""The orders."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order, in whose transaction a task is called."""

    number: models.IntegerField[int, int] = models.IntegerField(unique=True)
