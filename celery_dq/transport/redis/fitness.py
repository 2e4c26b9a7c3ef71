"""Ask the server before trusting it with messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import exceptions

from celery_dq.errors import ServerError

#: A server in the middle of a failover or a restart says these; it will be well again.
PASSING_ERRORS: tuple[type[exceptions.RedisError], ...] = (
    exceptions.ReadOnlyError,
    exceptions.BusyLoadingError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
)
#: LPOS, GETDEL, ZRANGE BYSCORE and the script semantics that the broker relies on.
OLDEST_REDIS = (6, 2)


def recognised(error: exceptions.ResponseError) -> exceptions.RedisError:
    """Return *error* as what it means, where redis-py does not see that the server is in a failover."""
    text = str(error)
    if text.startswith("UNBLOCKED"):
        # A master became a replica: it answers who waits, and hangs up.
        return exceptions.ConnectionError(text)
    if not isinstance(error, PASSING_ERRORS) and "-READONLY " in text:
        # Before Redis 7 an error inside a script is wrapped in another.
        return exceptions.ReadOnlyError(text)
    return error


def check_server(client: Any, allow_eviction: bool) -> None:
    """Refuse a server that is too old or that may throw messages away.

    Arguments:
        client: a connected redis client.
        allow_eviction: accept ``maxmemory`` with an evicting policy all the same.

    Raises:
        ServerError: naming what was found and what to change.
    """
    info = client.info("server") | client.info("memory")
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("redis_version", "0"))
    if _numbers(version) < OLDEST_REDIS:
        wanted = ".".join(map(str, OLDEST_REDIS))
        raise ServerError(
            f"The server is {name} {version}; celery-dq needs Redis {wanted} or Valkey: upgrade it."
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if int(info.get("maxmemory", 0)) and policy != "noeviction" and not allow_eviction:
        raise ServerError(
            f"The server has maxmemory-policy {policy!r}, with which it throws messages away when its "
            "memory is full. Set it to 'noeviction' (then publishing fails instead), or, if losing messages "
            "is fine, set dq_allow_eviction = True."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@contextmanager
def old_servers_named() -> Iterator[None]:
    """Say what it means that a server does not know HELLO: redis-py greets with it, since Redis 6.

    Raises:
        ServerError: the server is that old.
    """
    try:
        yield
    except exceptions.ResponseError as exc:
        if "HELLO" not in str(exc).upper():
            raise
        raise ServerError(
            f"The server is older than Redis 6 ({exc}); celery-dq needs Redis 6.2 or Valkey: upgrade it."
        ) from exc
