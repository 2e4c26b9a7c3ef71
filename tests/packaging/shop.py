"""The app of the installed package: the tests copy it out of the tree.

``python shop.py`` calls a task of each kind and prints the results.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

import celery_dq

app: Any = celery_dq.setup(Celery("shop"))
app.conf.update(json.loads(os.environ["SHOP"]))
app.conf.update(
    task_routes={"shop.post": "ledger"},
    dq_singleton_queues=["ledger"],
    broker_connection_retry_on_startup=True,
    task_create_missing_queues=True,
)


@app.task(name="shop.notify", tenant="{merchant}")  # type: ignore[untyped-decorator]
def notify(merchant: str) -> str:
    return f"notified {merchant}"


@app.task(name="shop.refresh", dedup={"key": "{product}"})  # type: ignore[untyped-decorator]
def refresh(product: str) -> str:
    return f"refreshed {product}"


@app.task(name="shop.post", bind=True)  # type: ignore[untyped-decorator]
def post(self: Any) -> str:
    return f"posted with token {self.request.dq_token}"


if __name__ == "__main__":
    print(celery_dq.__file__)
    results = [
        notify.delay("bakery"),
        notify.apply_async(("buffered bakery",), buffered=True),
        refresh.delay("bread"),
        post.delay(),
    ]
    for result in results:
        print(result.get(timeout=60))
