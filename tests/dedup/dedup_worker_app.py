"""The Celery app of worker processes: tasks that record their runs in Redis, and wait at a barrier."""

from __future__ import annotations

import os
from typing import Any

import redis
from celery import Celery

import celery_dq
from celery_dq.dedup import dedup
from tests.workers import ENVIRONMENT, app_from_environment

NAME = "dedup"


def add_tasks(app: Celery) -> Celery:
    celery_dq.setup(app)

    @dedup(key="{sku}", name="sku")
    def work(task: Any, sku: Any, version: int) -> Any:
        # No timeout: a repeated request would count the task twice, as an overlap with itself.
        with redis.Redis.from_url(app.conf["witness"], socket_timeout=None) as witness:
            # A count above 1 is an overlap of two runs.
            met = witness.incr(f"inside:{sku}") > 1
            witness.rpush("runs", f"{version}:{os.getpid()}:{int(met)}")
            witness.blpop([f"door:{sku}"], timeout=60)
            witness.decr(f"inside:{sku}")
        return [sku, version]

    app.task(shared=False, name="early", bind=True)(work)
    app.task(shared=False, name="late", bind=True, acks_late=True)(work)
    # Since Celery 5.7.
    retried: dict[str, Any] = {"retry_on_worker_lost": True, "default_retry_delay": 0}
    make: Any = app.task(shared=False, name="retried", bind=True, **retried)
    make(work)

    @app.task(shared=False, name="limited", bind=True)
    @dedup(key="{sku}", name="sku", timeout=3)
    def limited(task: Any, sku: Any, version: int) -> Any:
        # A run after the one that was ended has the same time limit, and must not wait.
        return work(task, sku, version) if version == 1 else [sku, version]

    return app


if ENVIRONMENT in os.environ:
    app = add_tasks(app_from_environment(NAME))
