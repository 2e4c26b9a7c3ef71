"""Connections of redis-py's asyncio with the parameters of a blocking pool, which kombu or Celery has made.

Addresses, TLS, credentials, timeouts and Sentinels are those of the blocking connections. A Redis Cluster and
connection classes of other programs have no counterpart here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import redis
import redis.sentinel
from redis.asyncio import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    sentinel as asyncio_sentinel,
)

from celery_dq.transport.redis.store.address import option_names

T = TypeVar("T")

#: The libraries whose classes of connections have counterparts. Those of Celery and kombu add nothing to the
#: ones of redis-py.
_LIBRARIES = ("redis", "kombu", "celery")


def _counterpart(connection_class: type) -> type | None:
    """Return the asyncio class for a class of blocking connections; None when there is none."""
    if connection_class.__module__.partition(".")[0] not in _LIBRARIES:
        return None
    encrypts = issubclass(connection_class, redis.SSLConnection)
    if issubclass(connection_class, redis.sentinel.SentinelManagedConnection):
        managed = asyncio_sentinel.SentinelManagedSSLConnection
        return managed if encrypts else asyncio_sentinel.SentinelManagedConnection
    if issubclass(connection_class, redis.UnixDomainSocketConnection):
        return UnixDomainSocketConnection
    if encrypts:
        return SSLConnection
    return Connection if issubclass(connection_class, redis.Connection) else None


def asyncio_pool(pool: redis.ConnectionPool) -> ConnectionPool | None:
    """Return a pool of asyncio connections like those of a blocking pool; None where there are none.

    It opens nothing, and may be used by one event loop only. Its connections have no socket timeout; see
    :func:`in_time`.

    Args:
        pool: A pool of redis-py, also one of Sentinel.
    """
    counterpart = _counterpart(pool.connection_class)
    if counterpart is None:
        return None
    kwargs = _kwargs(pool.connection_kwargs, counterpart)
    if kwargs is None:
        return None
    if not isinstance(pool, redis.sentinel.SentinelConnectionPool):
        return ConnectionPool(connection_class=counterpart, **kwargs)
    manager = pool.sentinel_manager
    hosts = [each.connection_pool.connection_kwargs for each in manager.sentinels]
    theirs = {key: each for key, each in manager.sentinel_kwargs.items() if key != "retry"}
    make_sentinel: Any = asyncio_sentinel.Sentinel  # its functions have no types
    make_pool: Any = asyncio_sentinel.SentinelConnectionPool
    sentinel = make_sentinel(
        [(each["host"], each["port"]) for each in hosts],
        min_other_sentinels=manager.min_other_sentinels,
        sentinel_kwargs=theirs,
    )
    made: ConnectionPool = make_pool(pool.service_name, sentinel, connection_class=counterpart, **kwargs)
    return made


async def in_time(timeout_s: float | None, awaited: Awaitable[T]) -> T:
    """Await an exchange with Redis for as long as a blocking connection waits for an answer.

    Not by the timeout of redis-py, which before Python 3.12 may lose the cancellation of a coroutine that
    sends.

    Args:
        timeout_s: Seconds; None waits without a limit.
        awaited: The exchange.

    Raises:
        redis.TimeoutError: There was no answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await awaited
    except TimeoutError as error:
        raise redis.TimeoutError("Timeout reading from socket") from error


async def close_sentinels(pool: Any) -> None:
    """Close the connections to Sentinels of an asyncio pool, if it has some."""
    manager = getattr(pool, "sentinel_manager", None)
    for sentinel in () if manager is None else manager.sentinels:
        await sentinel.connection_pool.disconnect()


def _kwargs(given: Mapping[str, Any], counterpart: type) -> dict[str, Any] | None:
    """Return the parameters that the counterpart takes; None when it lacks one that must not be left out."""
    known = option_names(counterpart)
    if any(name.startswith("ssl") and name not in known and given[name] is not None for name in given):
        # Without it, a connection might trust another server.
        return None
    # Retries are made by the callers; objects of a blocking pool do not fit.
    left_out = (
        *("retry", "event_dispatcher", "parser_class", "redis_connect_func", "connection_pool"),
        "himport_registry",
    )
    kept = {
        name: value
        for name, value in given.items()
        if name in known and name not in left_out and not name.startswith(("maint_", "oss_", "orig_"))
    }
    connect_s = given.get("socket_connect_timeout") or given.get("socket_timeout")
    return {**kept, "socket_connect_timeout": connect_s, "socket_timeout": None}
