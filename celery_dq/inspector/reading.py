"""What every snapshot needs to read a reply."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias

#: A ``redis.Redis`` that does not decode. Its own annotations mix blocking and asyncio replies.
Client: TypeAlias = Any


def text(reply: Any) -> str:
    """Return a reply as text; what is not UTF-8 stays visible and reversible."""
    return reply.decode("utf-8", "surrogateescape") if isinstance(reply, bytes) else str(reply)


def moment(time_us: float) -> datetime | None:
    """Return a time of the server, µs since the epoch, as an aware datetime; None for 0."""
    return datetime.fromtimestamp(time_us / 1e6, timezone.utc) if time_us else None


def server_time_us(client: Client) -> int:
    """Return the server's clock, µs since the epoch."""
    seconds, micros = client.time()
    return int(seconds) * 1_000_000 + int(micros)


def scan(
    client: Client, kind: Literal["hash", "zset"], key: str, count: int = 500
) -> Iterator[list[tuple[bytes, Any]]]:
    """Yield a hash as chunks of (field, value), or a sorted set as chunks of (member, score).

    The server is free between two chunks. As with every scan, a pair may come twice, and one that is
    there all the time comes at least once.
    """
    cursor = 0
    while True:
        if kind == "hash":
            cursor, found = client.hscan(key, cursor, count=count)
            yield list(found.items())
        else:
            cursor, found = client.zscan(key, cursor, count=count)
            yield found
        if int(cursor) == 0:
            return
