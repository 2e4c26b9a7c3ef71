"""A process that orders until it kills itself: ``python -m tests.outbox.shop.caller NUMBER SEED``."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import django
from django.db import Error, connections, transaction

from tests.outbox.shop.console import Undo

#: Orders of one process.
MOST = 100_000


def main(caller: int, seed: int) -> None:
    """Order in transactions, some of which are rolled back, in part or as a whole."""
    django.setup()
    from tests.outbox.shop.celery import notify
    from tests.outbox.shop.models import Order

    chance = random.Random(seed)
    for number in range(caller * MOST, (caller + 1) * MOST):
        try:
            order(chance, str(caller), number, Order, notify)
        except Error:
            # The database is cut off, now and then.
            connections.close_all()
            time.sleep(0.05)  # the pace of the load
        time.sleep(chance.choice((0.0, 0.002, 0.01)))  # the pace of the load


def order(chance: random.Random, tenant: str, number: int, orders: Any, notify: Any) -> None:
    """Write an order and call a task, in one transaction. The order is the ledger of the call."""
    point = chance.random()
    try:
        with transaction.atomic():
            try:
                with transaction.atomic():
                    notify.delay(tenant, -number)
                    raise Undo
            except Undo:
                pass
            orders.objects.create(number=number)
            notify.delay(tenant, number)
            if point < 0.02:
                os.kill(os.getpid(), signal.SIGKILL)
            if point > 0.9:
                raise Undo
    except Undo:
        pass
    if 0.02 <= point < 0.04:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
