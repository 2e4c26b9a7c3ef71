"""Functions that read values from Redis, for all snapshots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from operator import methodcaller
from typing import Any, Literal, TypeAlias, TypeVar

from celery_dq.errors import InvalidRequest
from celery_dq.transport.message_record import LATEST_US
from celery_dq.transport.redis.store.rounds import Rounds, run_one

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


def is_unicode(name: str) -> bool:
    """Return whether a name from :func:`text` can be encoded: Celery can use no other one."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def number(value: Any) -> float:
    """Return a stored number; 0 without one, and for a field that holds none, which another program wrote."""
    try:
        found = float(value or 0)
    except (TypeError, ValueError):
        return 0.0
    return found if math.isfinite(found) else 0.0


def moment(time_us: float) -> datetime | None:
    """Return a time of the server, in µs since 1970, as an aware datetime; None for 0 and for no time."""
    try:
        return datetime.fromtimestamp(time_us / 1e6, timezone.utc) if time_us else None
    except (ValueError, OverflowError, OSError):  # another program may have written any number
        return None


def check_count(name: str, value: Any, least: int = 1, most: int = MOST) -> int:
    """Check a requested number, of rows by default, and return it.

    Args:
        name: Name of the argument, for the error.
        value: The number.
        least: Smallest allowed number.
        most: Largest allowed number.

    Raises:
        InvalidRequest: `value` is not a whole number from `least` to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidRequest(f"{name} = {value!r}: give a whole number from {least} to {most}")
    return value


def check_seconds(name: str, value: Any) -> float:
    """Check a number of seconds from 0 to about 100 years, and return it.

    Args:
        name: Name of the argument, for the error.
        value: The seconds.

    Raises:
        InvalidRequest: `value` is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 3_200_000_000:
        raise InvalidRequest(f"{name} = {value!r}: give seconds from 0 to 3200000000")
    return value


def bounded_us(value: datetime) -> int:
    """Return a time in µs since 1970, from 0 to :data:`LATEST_US`; without a zone it is local time."""
    try:
        time_us = round(value.timestamp() * 1e6)
    except (ValueError, OverflowError):  # The years 1 and 9999, in some zones.
        time_us = LATEST_US if value.year > 1970 else 0
    return min(max(time_us, 0), LATEST_US)


def check_moment(name: str, value: Any, instead: str = "") -> int:
    """Check a time from 1970 to 2255, and return it in µs since 1970; without a zone it is local time.

    Args:
        name: Name of the argument, for the error.
        value: The time.
        instead: What may be given instead of a time, for the error.

    Raises:
        InvalidRequest: `value` is not such a time.
    """
    time_us = bounded_us(value) if isinstance(value, datetime) else 0
    if not 0 < time_us < LATEST_US:
        raise InvalidRequest(f"{name} = {value}: give a datetime of the years 1970 to 2254{instead}")
    return time_us


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


def command(name: str, *args: Any, **options: Any) -> Rounds[Any]:
    """Return the reply to one command of redis-py."""
    (reply,) = yield methodcaller(name, *args, **options)
    return reply


def first_of(key: str, limit: int, *, highest: bool = False) -> Rounds[list[tuple[bytes, float]]]:
    """Return up to `limit` (member, score) pairs of a sorted set, the lowest scores first, in chunks.

    Args:
        key: The sorted set.
        limit: Number of pairs.
        highest: Whether the highest scores come first.
    """
    found: dict[bytes, float] = {}
    for start in range(0, limit, CHUNK):
        end = min(start + CHUNK, limit)
        (part,) = yield methodcaller("zrange", key, start, end - 1, desc=highest, withscores=True)
        found.update(part)
        if len(part) < end - start:
            break
    return list(found.items())


def server_time_us(client: Client) -> int:
    """Return the time of the server in µs since 1970."""
    seconds, micros = run_one(client, command("time"))
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
        cursor, found = getattr(client, f"{kind[0]}scan")(key, cursor, count=count)
        yield list(found.items()) if kind == "hash" else found
        if int(cursor) == 0:
            return


def scan_all(kind: Literal["hash", "zset"], key: str, most: int | None = None) -> Rounds[dict[bytes, Any]]:
    """Return a hash as field -> value, or a sorted set as member -> score, read in chunks as by :func:`scan`.

    Args:
        kind: The type of the key.
        key: The key.
        most: Number of entries after which the scan ends. Default: all.
    """
    found: dict[bytes, Any] = {}
    cursor = 0
    while most is None or len(found) < most:
        ((cursor, part),) = yield methodcaller(f"{kind[0]}scan", key, cursor, count=CHUNK)
        found.update(part)
        if int(cursor) == 0:
            break
    return found
