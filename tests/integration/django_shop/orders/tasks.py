"""Tasks as a reusable Django app writes them."""

from __future__ import annotations

import os

from celery import shared_task


@shared_task(tenant=os.environ.get("SHOP_TENANT", "{merchant}"))
def notify(merchant: int, order: int = 0) -> None:
    """Push an order to a merchant."""
