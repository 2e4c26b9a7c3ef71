"""The tasks of the workers under chaos."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery, Task

from tests.chaos.ledger import Ledger
from tests.workers import ENVIRONMENT, app_from_environment

NAME = "chaos"


class Books:
    """Return the ledger of this process, which is opened after the fork."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pid = 0
        self._ledger: Ledger | None = None

    def open(self) -> Ledger:
        if self._ledger is None or self._pid != os.getpid():
            self._ledger, self._pid = Ledger(self._port), os.getpid()
        return self._ledger


def add_tasks(app: Celery, ledger_port: int) -> Celery:
    books = Books(ledger_port)

    @app.task(
        name="work", bind=True, shared=False, acks_late=True, reject_on_worker_lost=True, ignore_result=True
    )
    def work(self: Task[Any, Any], number: int, tenant: str, seconds: float) -> None:
        ledger = books.open()
        request: Any = self.request
        redelivered = bool((request.delivery_info or {}).get("redelivered"))
        line = (request.id, number, tenant, request.hostname, os.getpid(), redelivered)
        ledger.write("start", *line)
        time.sleep(seconds)  # the work
        ledger.write("finish", *line)

    return app


if ENVIRONMENT in os.environ:
    app = app_from_environment(NAME)
    add_tasks(app, int(app.conf["ledger_port"]))
