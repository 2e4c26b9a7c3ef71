"""Calls in a transaction: they are published after the commit, and only then."""

from __future__ import annotations

from celery_dq.testing.waiting import wait_until
from tests.outbox.outbox_shop import OutboxShop

ORDER = """
with transaction.atomic():
    Order.objects.create(number=1)
    notify.delay("acme", 1)
    answer = [OutboxRow.objects.count(), app.dq.queues["push"].depth]
"""


def test_a_call_in_a_transaction_runs_after_the_commit(shop: OutboxShop) -> None:
    assert shop.run(ORDER) == [1, 0]
    with shop.worker():
        wait_until(shop.has_run, 30)
        shop.await_empty()
    assert shop.has_run() == [1]


def test_a_transaction_that_is_rolled_back_publishes_nothing(shop: OutboxShop) -> None:
    shop.run("""
try:
    with transaction.atomic():
        notify.delay("acme", 1)
        raise Undo
except Undo:
    pass
with transaction.atomic():
    notify.delay("acme", 2)
    try:
        with transaction.atomic():
            notify.delay("acme", 3)
            raise Undo
    except Undo:
        pass
    notify.delay("acme", 4)
""")
    assert shop.rows() == 2
    with shop.worker(queues="other"):
        shop.await_empty()
    assert shop.waiting() == [2, 4]


def test_a_row_of_a_full_tenant_is_kept_with_the_reason_or_waits(sqlite_shop: OutboxShop) -> None:
    shop = sqlite_shop
    shop.run("""
app.dq.quotas.set("push", "acme", max_waiting=1)
app.dq.quotas.set("push", "patient", max_waiting=1, when_full="wait")
with transaction.atomic():
    for number in range(6):
        notify.delay(("acme", "patient", "other")[number % 3], number)
""")
    with shop.worker(queues="other"):
        wait_until(lambda: shop.run("answer = OutboxRow.objects.exclude(error='').count()"), 60)
        assert "max_waiting allows no more" in shop.run(
            "answer = OutboxRow.objects.exclude(error='').get().error"
        )
        shop.run("app.dq.quotas.set('push', 'patient', max_waiting=2)")
        wait_until(lambda: shop.rows() == 1, 30)
    assert sorted(shop.waiting()) == [0, 1, 2, 4, 5]
