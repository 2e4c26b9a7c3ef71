"""Checks whether a server is fit for a broker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import exceptions

from celery_dq.errors import ConfigurationError, ServerError
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)

#: Errors of a server during a failover or a restart; they pass.
PASSING_ERRORS: tuple[type[exceptions.RedisError], ...] = (
    exceptions.ReadOnlyError,
    exceptions.BusyLoadingError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
)
#: LPOS, GETDEL, ZRANGE BYSCORE and the script semantics that the broker relies on.
OLDEST_REDIS = (6, 2)
#: Sharded PUB/SUB.
OLDEST_ON_CLUSTER = (7, 0)
#: The warning for a Redis user without the right to ``INFO``.
UNCHECKED = (
    "The Redis user of broker_url has no right to INFO, so the server's version and maxmemory-policy were "
    "not checked: a server that evicts keys would lose messages. Grant +info, or make sure that the server "
    "is Redis 6.2 or later and has maxmemory-policy noeviction."
)


def recognised_error(error: exceptions.ResponseError) -> exceptions.RedisError:
    """Return *error*, or a fitting error of redis-py where its class does not show a failover."""
    text = str(error)
    if text.startswith("UNBLOCKED"):
        # A master became a replica: it answers the blocked clients and closes their connections.
        return exceptions.ConnectionError(text)
    if not isinstance(error, PASSING_ERRORS) and "-READONLY " in text:
        # Before Redis 7 an error inside a script is wrapped in another.
        return exceptions.ReadOnlyError(text)
    return error


def check_server(client: Any, allow_eviction: bool, on_cluster: bool = False) -> None:
    """Refuse a server that is too old or that may evict messages.

    A Redis user without the right to ``INFO`` gets a warning, and the server is used unchecked.

    Args:
        client: a connected redis client.
        allow_eviction: accept ``maxmemory`` with an evicting policy.
        on_cluster: whether the server is a node of a Redis Cluster, as the broker URL says.

    Raises:
        ServerError: the server is too old, evicts keys, or is a node of a cluster and must not be one.
    """
    info = server_info(client, "server", "memory")
    if info is None:
        logger.warning("%s", UNCHECKED, extra={"event": "server_unchecked"})
        return
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("redis_version", "0"))
    if is_cluster_node(info) and not on_cluster:
        raise ServerError(
            "The server is a node of a Redis Cluster, and broker_url names it as a single server: write "
            "dq-rediscluster://host:port,host:port with some nodes of the cluster."
        )
    oldest = OLDEST_ON_CLUSTER if on_cluster else OLDEST_REDIS
    if _numbers(version) < oldest:
        wanted, where = ".".join(map(str, oldest)), " on a Redis Cluster" if on_cluster else ""
        raise ServerError(
            f"The server is {name} {version}; celery-dq needs Redis {wanted} or Valkey{where}: upgrade it."
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if int(info.get("maxmemory", 0)) and policy != "noeviction" and not allow_eviction:
        raise ServerError(
            f"The server has maxmemory-policy {policy!r}, with which it evicts messages when its memory is "
            "full. Set it to 'noeviction' (then publishing fails instead), or, if losing messages is fine, "
            "set dq_allow_eviction = True."
        )

    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if most and used >= most:
        logger.warning(
            "The memory of Redis is full (%d of %d bytes): publishing is refused until workers have taken "
            "enough messages out. Workers go on. Start more of them, or raise maxmemory.",
            used,
            most,
            extra={"event": "redis_full"},
        )


def server_info(client: Any, *sections: str) -> dict[str, Any] | None:
    """Return these sections of ``INFO``; None when the Redis user has no right to it."""
    info: dict[str, Any] = {}
    try:
        for section in sections:
            info |= client.info(section)
    except exceptions.NoPermissionError:
        return None
    return info


def refuses_login(error: BaseException | None) -> bool:
    """Return whether an error, or one behind it, says that the server refuses the user or the password."""
    while error is not None and not isinstance(error, exceptions.AuthenticationError):
        error = error.__cause__
    return error is not None


def is_cluster_node(info: dict[str, Any]) -> bool:
    """Return whether the section ``server`` of ``INFO`` is that of a node of a Redis Cluster."""
    return "cluster" in (info.get("redis_mode"), info.get("server_mode"))  # Valkey 8 has renamed the field


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@contextmanager
def connection_refusals_named() -> Iterator[None]:
    """Raise an error with a remedy when a server refuses a connection.

    Raises:
        ServerError: the server does not know HELLO, which redis-py sends first: it is older than Redis 6.
        ConfigurationError: the server has no database of that number.
        redis.AuthenticationError: the server refuses the user or the password.
    """
    try:
        yield
    except exceptions.AuthenticationError as exc:
        # A connection error, as it was: the server may get its users after the worker.
        raise exceptions.AuthenticationError(
            f"Redis refuses the user or the password of broker_url ({str(exc).rstrip('.')}): correct them "
            "there, or on the server"
        ) from exc
    except exceptions.ResponseError as exc:
        if "DB index is out of range" in str(exc):
            raise ConfigurationError(
                "The database in broker_url does not exist on this Redis: give a number from 0 to 15, or "
                "below the server's setting 'databases' if that was changed"
            ) from exc
        if "HELLO" not in str(exc).upper():
            raise
        raise ServerError(
            f"The server is older than Redis 6 ({exc}); celery-dq needs Redis 6.2 or Valkey: upgrade it."
        ) from exc
