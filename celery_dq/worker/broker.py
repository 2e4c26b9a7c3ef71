"""Clients of the broker's Redis for those who must not wait for it."""

from __future__ import annotations

from typing import Any

import redis

__all__ = ["broker_client"]


def broker_client(app: Any, timeout_s: float) -> Any:
    """A client of the broker's Redis that gives up on an answer after `timeout_s` seconds."""
    with app.connection_for_write() as connection:
        client = connection.default_channel.keeper_clients()()
    pool = client.connection_pool
    if type(pool) is not redis.ConnectionPool:
        # It was made for this client, and no connection has been.
        pool.connection_kwargs.update(socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        return client
    options = {**pool.connection_kwargs, "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    ours = redis.ConnectionPool(connection_class=pool.connection_class, **options)
    return redis.Redis(connection_pool=ours)
