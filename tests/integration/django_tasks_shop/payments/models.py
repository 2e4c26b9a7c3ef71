"""A table of the project with quotas, which are copied to the broker. The guide on Django shows this file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from django.db import models, transaction

from celery_dq.inspector.live_quotas import QuotaChange
from celery_dq.options import Quota


def quotas() -> Any:
    """Return the live quotas; the app is imported late, because it imports the settings."""
    from bank.celery import app  # type: ignore[import-not-found]  # on the path of the project

    return app.dq.quotas


class Contract(models.Model):
    """The rate that a merchant has bought."""

    merchant: models.CharField[str, str] = models.CharField(max_length=100, unique=True)
    rate: models.CharField[str, str] = models.CharField(max_length=20)  # such as "50/s"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Copy the quota after the commit."""
        super().save(*args, **kwargs)
        transaction.on_commit(partial(quotas().set, "push", self.merchant, rate=self.rate))

    def delete(self, *args: Any, **kwargs: Any) -> Any:
        """Remove the quota after the commit."""
        transaction.on_commit(partial(quotas().remove, "push", self.merchant))
        return super().delete(*args, **kwargs)


def drift(contracts: Iterable[Contract]) -> list[QuotaChange]:
    """Return the changes that make the broker's quotas equal to the contracts."""
    live = quotas().live("push")
    wanted = {
        each.merchant: Quota.parse(
            {"rate": each.rate}, base=live.tenants.get(each.merchant, Quota()), where=each.merchant
        )
        for each in contracts
    }
    found: list[QuotaChange] = quotas().changes("push", replace(live, tenants=wanted))
    return found
