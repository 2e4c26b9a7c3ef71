"""Types of options that give a time or a duration."""

from __future__ import annotations

from datetime import datetime, timedelta

import click

from celery_dq.duration import parse_duration
from celery_dq.errors import ConfigurationError

__all__ = ["duration", "since", "time"]


def time(text: str) -> datetime:
    """Read a time in ISO format; without a zone it is local time."""
    try:
        # Python 3.10 does not read the Z of UTC.
        return datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is not a time such as 2026-03-01T18:00 (local time) or 2026-03-01T17:00Z"
        ) from None


def duration(text: str) -> timedelta:
    """Read a duration such as ``90s``, ``15m`` or ``2h``; a number is seconds."""
    with_unit = f"{text}s" if text.replace(".", "", 1).isdecimal() else text
    try:
        return timedelta(microseconds=parse_duration(with_unit, option="the duration"))
    except (ConfigurationError, OverflowError) as exc:
        raise click.BadParameter(str(exc)) from None


def since(text: str) -> datetime:
    """Read a time in ISO format, or a duration before now such as ``2h``."""
    if text[-1:].isdecimal() or text.endswith("Z"):
        return time(text)
    try:
        return datetime.now().astimezone() - duration(text)
    except click.BadParameter:
        raise click.BadParameter(
            f"{text!r} is not a time such as 2026-03-01T18:00, nor a duration such as 2h"
        ) from None
    except OverflowError:
        raise click.BadParameter(f"{text!r} is before the year 1; give a shorter duration") from None
