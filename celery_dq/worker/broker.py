"""Clients of the broker's Redis with a time limit, for threads that must not wait for it."""

from __future__ import annotations

from typing import Any

__all__ = ["broker_client"]


def broker_client(app: Any, timeout_s: float) -> Any:
    """Make a client of the broker's Redis whose calls fail after `timeout_s` seconds without an answer."""
    with app.connection_for_write() as connection:
        return connection.default_channel.own_clients(timeout_s)()
