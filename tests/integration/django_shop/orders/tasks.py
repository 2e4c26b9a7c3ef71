"""Tasks as a reusable Django app writes them."""

from __future__ import annotations

import os

from celery import shared_task

TENANT = os.environ.get("SHOP_TENANT", "{merchant}")


@shared_task(tenant=TENANT)  # type: ignore[call-overload,untyped-decorator]  # an option of ours
def notify(merchant: int, order: int = 0) -> None:
    """Push an order to a merchant."""
