"""Functions that read values from Redis, for all snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias, TypeVar

from celery_dq.errors import InvalidRequest

#: A ``redis.Redis`` that does not decode replies. Its own annotations mix blocking and asyncio replies.
Client: TypeAlias = Any
T = TypeVar("T")

#: Entries that one command may read, because the server serves no other client meanwhile.
CHUNK = 500
#: Entries that one call may read.
MOST = 1_000_000


def text(reply: Any) -> str:
    """Return a reply as text. Bytes that are not UTF-8 become surrogates, which is reversible."""
    return reply.decode("utf-8", "surrogateescape") if isinstance(reply, bytes) else str(reply)


def moment(time_us: float) -> datetime | None:
    """Return a time of the server, in µs since 1970, as an aware datetime; None for 0."""
    return datetime.fromtimestamp(time_us / 1e6, timezone.utc) if time_us else None


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Check a requested number of rows, and return it.

    Args:
        name: Name of the argument, for the error.
        value: The number.
        least: Smallest allowed number.

    Raises:
        InvalidRequest: `value` is not a whole number from `least` to :data:`MOST`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise InvalidRequest(f"{name} = {value!r}: give a whole number from {least} to {MOST}")
    return value


def check_text(name: str, value: Any) -> str:
    """Check a name or an id, and return it.

    Args:
        name: Name of the argument, for the error.
        value: The text.

    Raises:
        InvalidRequest: `value` is not a text, is empty, or cannot be encoded.
    """
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} = {value!r}: give a text, not empty")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"{name} = {value!r} is not valid Unicode ({exc.reason})") from None
    return value


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield `items` in chunks that are small enough for one command."""
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]


def first_of(client: Client, key: str, limit: int) -> list[tuple[bytes, float]]:
    """Return up to `limit` (member, score) pairs of a sorted set, the lowest scores first, in chunks."""
    found: dict[bytes, float] = {}
    for start in range(0, limit, CHUNK):
        end = min(start + CHUNK, limit)
        part = client.zrange(key, start, end - 1, withscores=True)
        found.update(part)
        if len(part) < end - start:
            break
    return list(found.items())


def server_time_us(client: Client) -> int:
    """Return the time of the server in µs since 1970."""
    seconds, micros = client.time()
    return int(seconds) * 1_000_000 + int(micros)


def scan(
    client: Client, kind: Literal["hash", "zset"], key: str, count: int = 500
) -> Iterator[list[tuple[bytes, Any]]]:
    """Yield a hash as chunks of (field, value), or a sorted set as chunks of (member, score).

    The server serves other clients between two chunks. As with each scan in Redis, a pair may come twice, and
    a pair that exists during the whole scan comes at least once.
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
