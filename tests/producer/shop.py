"""The app of the tests with workers: ``celery -A tests.producer.shop worker``."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

import celery_dq

app = Celery("shop", set_as_current=False)
app.conf.update(json.loads(os.environ.get("SHOP_CONF", "{}")))
if not os.environ.get("SHOP_IS_STOCK"):
    celery_dq.setup(app)


@app.task(name="add", shared=False)
def add(a: int, b: int) -> int:
    return a + b


@app.task(name="publish", shared=False)
def publish() -> dict[str, int]:
    """Make a call in a task."""
    add.delay(1, 1)
    add.delay(1, 1)
    buffer = app.dq.buffer  # type: ignore[attr-defined]
    return {"buffered": buffer.inspect().counters.get("accepted", 0)}


@app.task(name="publish_later", shared=False)
def publish_later() -> None:
    """Make a buffered call in a task, and do not wait for it."""
    task: Any = add
    task.apply_async((1, 1), queue="later", buffered=True)
