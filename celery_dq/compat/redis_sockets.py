"""The sockets of redis-py's connections, at which the consumer thread waits."""

from __future__ import annotations

from typing import Any

from celery_dq.compat.guard import check

check("redis_sockets")


def socket_of(connection: Any) -> Any:
    """Return the socket of a connection; None while it is not connected."""
    return getattr(connection, "_sock", None)
