"""Clients of the broker's Redis for those who must not wait for it."""

from __future__ import annotations

from typing import Any

__all__ = ["broker_client"]


def broker_client(app: Any, timeout_s: float) -> Any:
    """A client of the broker's Redis that gives up on an answer after `timeout_s` seconds."""
    with app.connection_for_write() as connection:
        return connection.default_channel.own_clients(timeout_s)()
