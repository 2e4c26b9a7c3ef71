"""Signs of workers that consume from the stock broker.

The transport does not write down which worker has received a message. Two signs tell of a living worker: it
answers a question by remote control, or one of its connections waits for messages. Each sign alone has a gap.
A solo worker answers nothing while a task runs, and a worker whose pool is full may not wait for messages.
"""

from __future__ import annotations

from typing import Any

import redis

from celery_dq.migration.stock_broker import StockBroker
from celery_dq.transport.aliases import TENANT_SCHEMES

__all__ = ["live_workers"]

#: Seconds for which the workers may answer.
TIMEOUT_S = 1.0


def live_workers(app: Any, stock: StockBroker) -> list[str]:
    """Return a text for each worker that seems to consume from the broker.

    Args:
        app: The Celery app, whose settings name the exchange of remote control.
        stock: The broker.
    """
    try:
        clients = stock.client.client_list()
    except redis.ResponseError as exc:
        return [f"unknown, because CLIENT LIST is refused ({exc})"]
    found = [
        f"the connection {client.get('addr')}"
        for client in clients
        if client.get("cmd", "").lower() == "brpop" and int(client.get("db", 0)) == stock.database
    ]
    # The workers of both brokers answer where both are in one database.
    answers = app.control.inspect(timeout=TIMEOUT_S, connection=stock.connection).stats() or {}
    return sorted(
        name
        for name, stats in answers.items()
        if (stats.get("broker") or {}).get("transport") not in TENANT_SCHEMES
    ) or sorted(found)
