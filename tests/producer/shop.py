"""The app of the tests with workers: ``celery -A tests.producer.shop worker``."""

from __future__ import annotations

import json
import os

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
