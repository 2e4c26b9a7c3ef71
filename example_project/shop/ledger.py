"""The task of the singleton queue "ledger": one posting after the other, by one worker at a time."""

from __future__ import annotations

import os
import time

from celery import Task, shared_task
from celery.exceptions import Reject
from django.db import transaction
from django.db.models import F

from books.plan import apply
from shop.models import Fence, Posting

WORK_S = float(os.environ.get("SHOP_LEDGER_WORK", "0.02"))
"""Seconds between reading the balance and writing the new one, in which another posting could interfere."""


@shared_task(bind=True, acks_late=True)
def post(self: Task, number: int, kind: str, amount: int) -> None:
    """Write one line, unless it exists: a leader may have died just after writing it."""
    if Posting.objects.filter(number=number).exists():
        return
    # Only the order of the queue prevents another posting in between.
    last = Posting.objects.order_by("-id").first()
    time.sleep(WORK_S)
    balance = apply(last.balance if last else 0, kind, amount)
    token = self.request.dq_token  # 0 without a leader, see --plain
    with transaction.atomic():
        # The highest token is stored beside the data and changes in the same transaction.
        if not Fence.objects.filter(id=1, token__lte=token).update(token=token):
            Fence.objects.filter(id=1).update(refused=F("refused") + 1)
        else:
            Posting.objects.create(
                number=number,
                kind=kind,
                amount=amount,
                balance=balance,
                token=token,
                worker=self.request.hostname,
                posted_at=time.time(),
            )
            return
    raise Reject("a later leader has taken over", requeue=False)
