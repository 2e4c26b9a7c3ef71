"""Numbers and times as the forms of the dashboard have them: times in UTC, or a duration from now."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_dq.duration import parse_duration
from celery_dq.errors import InvalidRequest


def exact(value: float) -> str:
    """Return a number in its short form, or in full if that would lose digits."""
    short = f"{value:g}"
    return short if float(short) == value and "e" not in short else repr(value)


def whole_number(given: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Read a whole number; `least` where there is none.

    Raises:
        InvalidRequest: The text is not one, or is less than `least`, or has more than eleven digits.
    """
    text = given.get(name, str(least))
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) >= least):
        raise InvalidRequest(f"{name} = {text[:20]!r}: give a whole number from {least}")
    return int(text)


#: Characters of a time that are read.
LONGEST = 40


def duration_or_time(name: str, text: str) -> timedelta | datetime:
    """Read a duration such as ``2h``, or a time such as ``2026-03-01T18:00``, which is in UTC.

    Args:
        name: Name of the field, for the error.
        text: The text, not empty.

    Raises:
        InvalidRequest: The text is neither.
    """
    text = text.strip()[:LONGEST]
    if "-" in text:
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidRequest(
                f"{name} = {text!r}: give a time in UTC such as 2026-03-01T18:00, or a duration such as 2h"
            ) from None
        return found if found.tzinfo else found.replace(tzinfo=timezone.utc)
    try:
        return timedelta(microseconds=parse_duration(text, option=name))
    except ValueError as exc:
        raise InvalidRequest(str(exc)) from None
    except OverflowError:
        raise InvalidRequest(f"{name} = {text!r}: give a shorter time, such as 365d") from None


def time_before(name: str, text: str) -> datetime | None:
    """Read a time, or a duration before now; None for an empty text.

    Raises:
        InvalidRequest: The text is neither, or before the year 1.
    """
    if not text.strip():
        return None
    found = duration_or_time(name, text)
    if isinstance(found, datetime):
        return found
    try:
        return datetime.now(timezone.utc) - found
    except OverflowError:
        raise InvalidRequest(f"{name} = {text[:LONGEST]!r}: give a shorter time, such as 365d") from None
