"""Calls in a transaction of Django: rows of the outbox, beside Celery's ``delay_on_commit``.

Each way is a process of its own, because Django is configured once: ``python -m benchmarks.outbox WAY …``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

from benchmarks.measure import Report, benchmark, interleave, percentile
from celery_dq.testing.servers import RedisServer
from tests.databases import PostgreSQLServer

STOCK, ON_COMMIT, OUTBOX = "stock, delay_on_commit", "dq, delay_on_commit", "dq, outbox"


@benchmark(
    "way | transactions/s | vs stock | p50 µs | p99 µs | relayed/s",
    """
    one thread; each transaction inserts a row and makes one call; PostgreSQL does not wait for its disk
    relayed/s is of one relay that finds all rows in the table
    """,
)
def outbox(report: Report, quick: bool) -> None:
    """Measure transactions with one call, until their commit, and then the relay."""
    amount, rounds = (1_000, 3) if quick else (10_000, 7)
    with PostgreSQLServer() as database:
        database.make_database("shop")
        found = interleave(
            (STOCK, ON_COMMIT, OUTBOX), rounds, partial(_measured, database.settings("shop"), amount), 240
        )
    report.compare(found, STOCK, "rate | vs rate | p50 | p99 | relayed")


def _measured(database: dict[str, Any], amount: int, way: str) -> dict[str, float]:
    with RedisServer() as server:
        url = server.url(scheme="redis" if way == STOCK else "dq-redis")
        words = [sys.executable, "-m", "benchmarks.outbox", way, url, json.dumps(database), str(amount)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run(way: str, url: str, database: dict[str, Any], amount: int) -> dict[str, float]:
    """Measure one way in this process."""
    import django
    from celery import Celery
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connection, transaction

    is_ours = way != STOCK
    app: Any = Celery("shop", broker=url)
    app.conf.update(task_default_queue="push", dq_outbox="default" if way == OUTBOX else "")
    settings.configure(
        DATABASES={"default": database},
        INSTALLED_APPS=["celery_dq.contrib.django"] if is_ours else [],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
    )
    django.setup()
    if is_ours:
        call_command("migrate", verbosity=0)

    def notify(merchant: int, order: str) -> None: ...

    task = app.task(name="notify", shared=False)(notify)

    def order() -> float:
        started = time.perf_counter()
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("INSERT INTO orders (name) VALUES ('A-1')")
            if way == OUTBOX:
                task.delay(42, "A-1")
            else:
                # As Celery's DjangoTask does.
                transaction.on_commit(partial(task.delay, 42, "A-1"))
        return time.perf_counter() - started

    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, name text)")
    for _ in range(20):
        order()
    started = time.perf_counter()
    waits = [order() for _ in range(amount)]
    figures = {"rate": amount / (time.perf_counter() - started)}
    figures |= {"p50": percentile(waits, 0.5) * 1e6, "p99": percentile(waits, 0.99) * 1e6}
    return {**figures, **(_relayed(app, amount) if way == OUTBOX else {})}


def _relayed(app: Any, amount: int) -> dict[str, float]:
    from celery_dq.contrib.django.models import OutboxRow
    from celery_dq.contrib.django.outbox.relay import OutboxRelay

    relay = OutboxRelay(app, "default")
    started = time.perf_counter()
    while OutboxRow.objects.exists():
        relay.execute(None)
    relayed_s = time.perf_counter() - started
    relay.hand_over()
    return {"relayed": amount / relayed_s}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))))
