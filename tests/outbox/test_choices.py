"""The calls that are rows, and those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.testing.waiting import wait_until
from tests.outbox.conftest import MakeShop
from tests.outbox.outbox_shop import OutboxShop

COUNTS = "answer = [OutboxRow.objects.count(), app.dq.queues['push'].depth]"


#: A call in a transaction, further settings, and how many rows and messages it makes.
CHOICES: list[tuple[str, dict[str, Any], list[int]]] = [
    ("notify.delay('acme', 1)", {}, [1, 0]),
    ("notify.apply_async(('acme', 1), outbox=False)", {}, [0, 1]),
    ("report.delay(1)", {}, [0, 1]),
    ("report.apply_async((1,), outbox=True)", {}, [1, 0]),
    ("app.send_task('elsewhere', (1,))", {}, [1, 0]),
    ("resize.delay({})", {}, [1, 0]),
    ("resize.apply_async(({},), dedup={{'on_duplicate': 'raise'}})", {}, [0, 1]),
    ("notify.apply_async(('acme', 1), connection=app.connection())", {}, [0, 1]),
    ("notify.apply_async(('acme', 1), outbox='default')", {"dq_outbox_opt_in": True}, [1, 0]),
    ("notify.apply_async(('acme', 1), outbox=True)", {"dq_outbox_opt_in": True}, [1, 0]),
    ("notify.delay('acme', 1)", {"dq_outbox_opt_in": True}, [0, 1]),
    ("notify.delay('acme', 1)", {"dq_outbox": ""}, [0, 1]),
]


def test_options_and_settings_choose_the_calls_that_are_rows(sqlite_shop: OutboxShop) -> None:
    for call, settings, counts in CHOICES:
        sqlite_shop.run("OutboxRow.objects.all().delete()\napp.dq.queues['push'].purge()")
        # The second call has a template.
        for number in (1, 2):
            sqlite_shop.run(f"with transaction.atomic():\n    {call.format(number)}", **settings)
            assert sqlite_shop.run(COUNTS, **settings) == [number * each for each in counts], (call, settings)


def test_signals_and_canvas_work_as_with_any_other_call(sqlite_shop: OutboxShop) -> None:
    shop = sqlite_shop
    text = """
from celery import chain, group
from celery.signals import after_task_publish, before_task_publish
seen = []
def mark(sender, headers, **_):
    headers["marked"] = "yes"
    seen.append(sender)
before_task_publish.connect(mark)
after_task_publish.connect(mark)
for _ in range(2):
    with transaction.atomic():
        notify.delay("acme", 1)
before_task_publish.disconnect(mark)
after_task_publish.disconnect(mark)
with transaction.atomic():
    group(notify.s("acme", number) for number in (2, 3)).apply_async()
    chain(notify.si("acme", 4), notify.si("acme", 5)).apply_async()
answer = [len(seen), OutboxRow.objects.count(), app.dq.queues["push"].depth]
"""
    assert shop.run(text) == [4, 5, 0]
    with shop.worker():
        wait_until(lambda: len(shop.has_run()) == 6, 30)
    assert sorted(shop.has_run()) == [1, 1, 2, 3, 4, 5]


def test_a_receiver_of_the_signals_of_all_models_can_call_a_task(sqlite_shop: OutboxShop) -> None:
    with sqlite_shop.worker(queues="other", SHOP_RECEIVER="yes"):
        sqlite_shop.run(
            "with transaction.atomic(): Order.objects.create(number=1).delete()", SHOP_RECEIVER="yes"
        )
        sqlite_shop.await_empty()
    assert sqlite_shop.waiting() == [0, 0]


def test_the_migrations_make_the_tables_of_the_models(sqlite_shop: OutboxShop) -> None:
    sqlite_shop.run("""
from django.core.management import call_command
call_command("makemigrations", "celery_dq", check=True, dry_run=True, verbosity=0)
""")


def test_a_router_keeps_the_table_out_of_a_database(make_shop: MakeShop) -> None:
    shop = make_shop("sqlite", "default", "billing")
    shop.run("""
from django.core.management import call_command
from django.test import override_settings
class Router:
    def allow_migrate(self, db, app_label, model_name=None, **hints):
        return db == "billing" if model_name == "outboxrow" else None
with override_settings(DATABASE_ROUTERS=[Router()]):
    for database in ("default", "billing"):
        connections[database].cursor().execute("DROP TABLE celery_dq_outboxrow")
        call_command("migrate", "celery_dq", "zero", fake=True, database=database, verbosity=0)
        call_command("migrate", "celery_dq", database=database, verbosity=0)
tables = [connections[each].introspection.table_names() for each in ("default", "billing")]
assert ["celery_dq_outboxrow" in each for each in tables] == [False, True]
""")


def test_a_call_outside_of_a_transaction_goes_to_the_broker(sqlite_shop: OutboxShop) -> None:
    sqlite_shop.run("for number in range(3): notify.delay('acme', number)")
    assert sqlite_shop.run(COUNTS) == [0, 3]
    sqlite_shop.run("with transaction.atomic(): notify.delay('acme', 3)")
    assert sqlite_shop.run(COUNTS) == [1, 3]


def test_calls_of_a_task_become_rows_when_its_option_changes(sqlite_shop: OutboxShop) -> None:
    text = """
for number in range(3): notify.delay('acme', number)
notify.outbox = True
with transaction.atomic(): notify.delay('acme', 3)
"""
    assert sqlite_shop.run(text + COUNTS, dq_outbox_opt_in=True) == [1, 3]


@pytest.mark.parametrize(
    ("call", "settings", "words"),
    [
        (
            "notify.apply_async(('acme', 1), outbox='stock')",
            {},
            "outbox = 'stock', but dq_outbox = 'default'",
        ),
        ("notify.apply_async(('acme', 1), outbox=True)", {"dq_outbox": ""}, "add the alias"),
        (
            "resize.apply_async((1,), outbox=True, dedup={'on_duplicate': 'raise'})",
            {},
            "contradicts on_duplicate='raise'",
        ),
        ("notify.delay('acme', 1)", {"result_backend": "rpc://"}, "the result backend 'rpc'"),
    ],
)
def test_a_call_that_cannot_be_a_row_raises_an_error_with_the_remedy(
    sqlite_shop: OutboxShop, call: str, settings: dict[str, Any], words: str
) -> None:
    text = f"""
from celery_dq.errors import ConfigurationError
try:
    with transaction.atomic():
        {call}
except ConfigurationError as error:
    answer = str(error)
"""
    assert words in sqlite_shop.run(text, **settings)
    assert sqlite_shop.run(COUNTS, **settings) == [0, 0]


def test_a_call_above_the_limit_is_refused_and_leaves_the_transaction_usable(shop: OutboxShop) -> None:
    text = """
from celery_dq.errors import QueueFull
with transaction.atomic():
    for number in range(3): notify.delay("acme", number)
with transaction.atomic():
    Order.objects.create(number=1)
    try:
        notify.delay("acme", 3)
    except QueueFull as error:
        answer = str(error)
"""
    assert "3 rows (dq_outbox_max_rows)" in shop.run(text, dq_outbox_max_rows=3)
    assert shop.run("answer = [OutboxRow.objects.count(), Order.objects.count()]") == [3, 1]
    # Numbers of rows that are gone do not count.
    text = """
for number in range(10):
    OutboxRow.objects.order_by("pk")[0].delete()
    with transaction.atomic(): notify.delay("acme", number)
answer = OutboxRow.objects.count()
"""
    assert shop.run(text, dq_outbox_max_rows=3) == 3


def test_a_call_is_a_row_of_the_database_whose_transaction_it_is_in(make_shop: MakeShop) -> None:
    shop = make_shop("sqlite", "default", "billing")
    text = """
with transaction.atomic(using="billing"):
    notify.delay("acme", 1)
with transaction.atomic():
    notify.delay("acme", 2)
    with transaction.atomic(using="billing"):
        notify.delay("acme", 3)
        notify.apply_async(("acme", 4), outbox="billing")
    notify.apply_async(("acme", 5), outbox="billing")
answer = [
    *(OutboxRow.objects.using(each).count() for each in ("default", "billing")),
    app.dq.queues["push"].depth,
]
"""
    assert shop.run(text, dq_outbox="default, billing") == [2, 2, 1]
    with shop.worker(queues="other", dq_outbox="default,billing"):
        shop.await_empty()
        shop.await_empty("billing")
    assert sorted(shop.waiting()) == [1, 2, 3, 4, 5]


def test_a_countdown_counts_from_the_call(sqlite_shop: OutboxShop) -> None:
    text = """
with transaction.atomic():
    task_id = notify.apply_async(("acme", 1), countdown=1000).id
answer = [task_id, OutboxRow.objects.get().created_at.timestamp()]
"""
    task_id, called_at = sqlite_shop.run(text)
    with sqlite_shop.worker(queues="other"):
        sqlite_shop.await_empty()
    due = sqlite_shop.run(f"answer = app.dq.find({task_id!r})[0].due.timestamp()")
    assert abs(due - called_at - 1000) < 1


@pytest.mark.parametrize(("retries", "numbers"), [(False, [7]), (True, [8])])
def test_a_task_calls_others_in_its_transaction_and_a_retry_is_sent_at_once(
    sqlite_shop: OutboxShop, retries: bool, numbers: list[int]
) -> None:
    sqlite_shop.run(f"order_in_task.delay(7, {retries})")
    with sqlite_shop.worker():
        wait_until(sqlite_shop.has_run, 30)
        sqlite_shop.await_empty()
    assert sqlite_shop.has_run() == numbers
    assert sqlite_shop.run("answer = [each.number for each in Order.objects.all()]") == numbers
