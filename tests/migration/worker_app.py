"""The app of the workers and of the command in `tests.migration.under_load`."""

from __future__ import annotations

import os
from typing import Any

import redis
from celery import Celery

import celery_dq
from tests.workers import ENVIRONMENT, app_from_environment

NAME = "moving"


def add_work(app: Celery) -> Celery:
    options: Any = {"tenant": "{tenant}"} if app.conf.broker_url.startswith("dq-") else {}
    ledgers: dict[int, Any] = {}

    @app.task(name="work", shared=False, acks_late=True, ignore_result=True, **options)
    def work(number: int, tenant: str) -> None:
        # A child of the pool needs a connection of its own.
        ledger = ledgers.get(os.getpid())
        if ledger is None:
            ledger = ledgers[os.getpid()] = redis.Redis.from_url(app.conf["ledger_url"])
        ledger.hincrby("runs", str(number), 1)

    @app.task(name="wait", shared=False, ignore_result=True)
    def wait() -> None:
        with redis.Redis.from_url(app.conf["ledger_url"]) as ledger:
            ledger.set("waits", 1)
            ledger.blpop("go", 60)

    return app


if ENVIRONMENT in os.environ:
    app = add_work(app_from_environment(NAME))
    # A stock worker knows no tenants, unless a test asks for a feature of celery-dq.
    if "dq_probe_file" in app.conf:
        celery_dq.setup(app)
