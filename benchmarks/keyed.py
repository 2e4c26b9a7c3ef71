"""The Celery app of the dedup benchmark's worker: a task that does nothing, with a dedup key and without."""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery

from celery_dq.dedup import dedup
from tests.workers import ENVIRONMENT, app_from_environment

NAME = "keyed"


def add_tasks(app: Celery) -> Celery:
    @app.task(name="plain", shared=False)
    def plain(sku: int) -> None: ...

    @app.task(name="dedup", shared=False)
    @dedup(key="{sku}")
    def keyed(sku: int) -> None: ...

    @app.task(name="mark", shared=False)
    def mark(key: str) -> None:
        with redis.Redis(port=app.conf["clock_port"], socket_timeout=None) as client:
            client.rpush(key, time.monotonic())

    return app


def conf(url: str, clock_port: int, **more: Any) -> dict[str, Any]:
    """The settings of the app here and in its worker."""
    return {
        "broker_url": url,
        "clock_port": clock_port,
        "task_ignore_result": True,
        "worker_prefetch_multiplier": 16,
        **more,
    }


if ENVIRONMENT in os.environ:
    app = add_tasks(app_from_environment(NAME))
