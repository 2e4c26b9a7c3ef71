"""The times in the headers and properties of a message, in microseconds since the epoch."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from celery_dq.errors import InvalidMessage

#: The first time, in µs, that a double would not hold exactly: in the year 2255.
LATEST_US = 9_000_000_000_000_000
_UNITS = {1_000_000: "seconds", 1000: "milliseconds"}


def due_us(eta: Any) -> int:
    """Return the header ``eta`` in µs since the epoch; 0 without one."""
    return 0 if eta is None else _instant_us("eta", eta)


def expires_us(expires: Any, expiration: Any, now_us: int) -> int:
    """Return when a message expires, in µs since the epoch; 0 for never.

    Args:
        expires: The header ``expires``.
        expiration: The property ``expiration``, in milliseconds from now.
        now_us: Wall time in µs.
    """
    if isinstance(expires, (int, float)):
        # The remote control of kombu: seconds since the epoch, or 0.
        return _later_us("expires", expires, 1_000_000, 0)
    if expires is not None:
        return _instant_us("expires", expires)
    return 0 if expiration is None else _later_us("expiration", expiration, 1000, now_us)


def _later_us(name: str, value: Any, unit_us: int, from_us: int) -> int:
    """Return the time that is a number of units after another one."""
    try:
        instant_us = from_us + max(int(float(value) * unit_us), 0)
    except (TypeError, ValueError, OverflowError):
        raise InvalidMessage(f"{name} = {value!r} is not a number of {_UNITS[unit_us]}") from None
    return _in_time(name, value, instant_us)


def _instant_us(name: str, value: Any) -> int:
    """Return an ISO 8601 text or a datetime as µs since the epoch. A value without a time zone is UTC."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value[:-1] + "+00:00" if value.endswith("Z") else value)
        if value.tzinfo is None:
            value = value.replace(tzinfo=timezone.utc)
        # 0 means that there is no time, so times before 1970 become 1.
        instant_us = max(int(value.timestamp() * 1_000_000), 1)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise InvalidMessage(
            f"{name} = {value!r} is not a time: give a datetime or an ISO 8601 text"
        ) from None
    return _in_time(name, value, instant_us)


def _in_time(name: str, value: Any, instant_us: int) -> int:
    if instant_us >= LATEST_US:
        raise InvalidMessage(f"{name} = {value} is too far away: the year 2255 is the last; leave it out")
    return instant_us
