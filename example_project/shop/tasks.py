"""The tasks of the shop: push a notice to a merchant; and, in ``ledger.py``, post a line of the ledger."""

from __future__ import annotations

from celery import Task, shared_task

from shop import webhook
from shop.models import Delivery
from shop.webhook import MAX_ATTEMPTS

PRIORITIES = {Delivery.Kind.CODE: 9, Delivery.Kind.ORDER: 5, Delivery.Kind.MARKETING: 0}
"""Urgency by kind, on celery-dq: 9 is the most urgent. (On the stock Redis transport it is 0.)"""


@shared_task(bind=True, tenant="{merchant_id}", acks_late=True, max_retries=MAX_ATTEMPTS - 1)
def push(self: Task, merchant_id: int, delivery_id: str) -> None:
    """Send a notice to a merchant; retry after one second, then two, when the merchant does not accept it.

    With ``tenant`` each merchant is a tenant of the queue on celery-dq. Other transports ignore it.
    """
    delivery = Delivery.objects.select_related("merchant").get(pk=delivery_id)
    attempt = self.request.retries + 1
    notice: dict[str, object] = {"id": delivery.pk, "kind": delivery.kind, "order": delivery.order_id}
    try:
        webhook.post(delivery.merchant.endpoint, notice, attempt)
    except webhook.NotDelivered as exc:
        if attempt < MAX_ATTEMPTS:
            note(delivery_id, Delivery.State.RETRYING, attempt)
            raise self.retry(exc=exc, countdown=2 ** (attempt - 1)) from exc
        note(delivery_id, Delivery.State.GIVEN_UP, attempt)
    else:
        note(delivery_id, Delivery.State.DELIVERED, attempt)


def note(delivery_id: str, state: str, attempts: int) -> None:
    """Record the state of a delivery."""
    Delivery.objects.filter(pk=delivery_id).update(state=state, attempts=attempts)
