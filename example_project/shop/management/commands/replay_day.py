"""``manage.py replay_day``: replay a day of the shop."""

from __future__ import annotations

import json
import time
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from day.ledger import Ledger, Published
from day.plan import CLASSES, LOUD, MARKETING, Notice, batches, class_of, plan
from project.celery import app
from shop.models import Delivery, Merchant, Order
from shop.tasks import PRIORITIES, push


class Command(BaseCommand):
    """Create the merchants, then store the day's orders and publish a notice for each when it is due."""

    help = "Replay a day of orders."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--seed", type=int, required=True)
        parser.add_argument("--merchants", type=int, required=True)
        parser.add_argument("--minutes", type=float, required=True)
        parser.add_argument("--endpoints", type=json.loads, required=True, help="ports by class, JSON")
        parser.add_argument("--ledger", required=True, help="URL of the ledger's Redis")
        parser.add_argument("--day", required=True, help="name of the day in the ledger")

    def handle(self, *args: Any, **options: Any) -> None:
        """Replay the day."""
        ledger = Ledger(options["ledger"], options["day"])
        notices = plan(options["seed"], options["merchants"], options["minutes"])
        sign_up(options["merchants"], options["endpoints"])
        with app.producer_pool.acquire(block=True) as producer:
            began = time.time()
            ledger.begin(began)
            for due, batch in batches(notices):
                time.sleep(max(0.0, began + due - time.time()))  # the clock of the replay
                take_orders(batch)
                ledger.publish([publish(notice, producer) for notice in batch])
        ledger.finish()
        ledger.close()


def sign_up(merchants: int, ports: dict[str, list[int]]) -> None:
    """Create the merchants, and on celery-dq set the quotas of the loud ones."""
    rows = []
    for number in range(1, merchants + 1):
        name = class_of(number)
        port = ports[name][number % len(ports[name])]
        rows.append(
            Merchant(pk=number, name=f"{name} {number}", endpoint=f"http://127.0.0.1:{port}/{number}")
        )
    Merchant.objects.bulk_create(rows, batch_size=500)
    if settings.ON_DQ:
        for number, name in enumerate(LOUD, start=1):
            quota = CLASSES[name]
            app.dq.quotas.set(
                "push",
                str(number),
                rate=f"{quota.rate}/s",
                burst=quota.burst,
                weight=1,
                concurrency=quota.concurrency,
            )


def take_orders(batch: list[Notice]) -> None:
    """Store the orders, and the notices that they cause."""
    orders = {
        notice.id: Order(merchant_id=notice.merchant, number=notice.id)
        for notice in batch
        if notice.kind != MARKETING
    }
    Order.objects.bulk_create(orders.values())
    Delivery.objects.bulk_create(
        [
            Delivery(pk=notice.id, merchant_id=notice.merchant, kind=notice.kind, order=orders.get(notice.id))
            for notice in batch
        ]
    )


def publish(notice: Notice, producer: Any) -> Published:
    """Publish one notice."""
    urgency = PRIORITIES[Delivery.Kind(notice.kind)]
    at = time.time()
    push.apply_async(
        (notice.merchant, notice.id),
        producer=producer,
        # In kombu's Redis transport 0 is the most urgent priority.
        priority=urgency if settings.ON_DQ else 9 - urgency,
    )
    return Published(notice.id, notice.merchant, notice.kind, at)
