"""The app of the fault run: a task that records which worker ran a message of which partition, and when."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery

from tests.conformance.shop import own_witness
from tests.workers import ENVIRONMENT, app_from_environment

NAME = "siege_app"
#: Seconds that a task takes.
WORK_S = 0.005


def add_task(app: Celery, port: int) -> None:
    """Register the task, which reports to the witness on `port`."""

    @app.task(name="mark", bind=True, acks_late=True, reject_on_worker_lost=True)
    def mark(self: Any, number: int, partition: int, sent_at: float) -> None:
        record = [number, partition, sent_at, time.time(), self.request.hostname]
        own_witness(port).report("ran", json.dumps(record))
        time.sleep(WORK_S)  # stands for work


if ENVIRONMENT in os.environ:
    app = app_from_environment(NAME)
    add_task(app, app.conf["witness_port"])
