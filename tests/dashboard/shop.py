"""The Celery app that the dashboard of the tests shows. Each test replaces it by its own."""

from __future__ import annotations

from typing import Any

from celery import Celery

import celery_dq

__all__ = ["app", "make_app"]


def make_app(broker_url: str, **settings: Any) -> Any:
    """Make the app of a producer: queue ``push``, and task ``notify``, whose tenant is its first argument."""
    made = Celery("shop", broker=broker_url, set_as_current=False)
    plain = {"task_default_queue": "push", "task_publish_retry_policy": {"max_retries": 0}}
    made.conf.update({**plain, **settings})
    celery_dq.setup(made)

    @made.task(shared=False, name="notify", tenant="{merchant}")
    def notify(merchant: Any, order: Any = 0) -> None: ...

    return made


app: Any = make_app("dq-redis://127.0.0.1:1/0")
