"""Conversion of durations and rates between settings and the microseconds that the scripts in Redis use.

A *duration* is a ``timedelta``, a number of seconds, or a number with a unit
(``"250ms"``, ``"15s"``, ``"5m"``, ``"2h"``, ``"7d"``). A *rate* is a number per
second or a number per unit (``"50/s"``, ``"3000/m"``, ``"10/h"``).
"""

from __future__ import annotations

import math
import re
import sys
from datetime import timedelta
from fractions import Fraction

from celery_dq.errors import ConfigurationError

__all__ = ["format_duration", "interval_us", "parse_duration", "parse_rate"]

SECOND_US = 1_000_000

_UNIT_US = (
    ("us", 1),
    ("µs", 1),
    ("ms", 1_000),
    ("s", SECOND_US),
    ("m", 60 * SECOND_US),
    ("min", 60 * SECOND_US),
    ("h", 3_600 * SECOND_US),
    ("d", 86_400 * SECOND_US),
)
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|µs|ms|s|min|m|h|d)\s*")
_PLAIN = re.compile(r"\s*\d+(?:\.\d+)?\s*")
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*/\s*(s|min|m|h|d)\s*")

DURATION_FORMS = "a timedelta, a number of seconds, or a text such as '250ms', '15s', '5m', '2h', '7d'"
RATE_FORMS = "a number per second, or a text such as '50/s', '3000/m', '10/h'"


def parse_duration(value: object, *, option: str) -> int:
    """Return a duration in whole microseconds; half a microsecond is rounded to even.

    Args:
        value: The duration, 0 or more; see the module for its forms.
        option: Name of the option, for the error.

    Raises:
        ConfigurationError: The value has another type, an unknown unit, or a negative, infinite or undefined
            number.
    """
    exact: Fraction | None = None
    if isinstance(value, timedelta):
        exact = Fraction(value // timedelta(microseconds=1))
    elif _is_number(value):
        exact = Fraction(str(value)) * SECOND_US
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        exact = Fraction(match[1]) * dict(_UNIT_US)[match[2]]
    if exact is None:
        raise ConfigurationError(
            f"{option} = {value!r} is not a duration: give {DURATION_FORMS}{_unquoted(value)}"
        )
    if exact < 0:
        raise ConfigurationError(f"{option} = {value!r} is negative: give a duration of 0 or more")
    return round(exact)


def parse_rate(value: object, *, option: str, instead: str = "to stop a tenant, set paused = True") -> float:
    """Return a rate as a number per second.

    Args:
        value: The rate, above 0; see the module for its forms. 0 is refused, because a tenant without any
            rate must be *paused* instead.
        option: Name of the option, for the error.
        instead: The remedy for a rate of 0, for the error.

    Raises:
        ConfigurationError: The value has another type, an unknown unit, or a number that is not above 0.
    """
    rate: float | None = None
    if _is_number(value):
        rate = float(str(value))
    elif isinstance(value, str) and (match := _RATE.fullmatch(value)):
        rate = float(Fraction(match[1]) * SECOND_US / dict(_UNIT_US)[match[2]])
    if rate is None:
        raise ConfigurationError(f"{option} = {value!r} is not a rate: give {RATE_FORMS}{_unquoted(value)}")
    if rate <= 0:
        raise ConfigurationError(f"{option} = {value!r} is not above zero: {instead}")
    return rate


def interval_us(rate: float) -> int:
    """Return the microseconds between two messages at `rate` per second.

    The result is rounded up, so that the rate is never exceeded. A result that differs from a whole number
    only by rounding errors counts as whole: ten per hour are 360,000,000 µs, not one more.
    """
    exact = SECOND_US / rate
    nearest = round(exact)
    if nearest and math.isclose(exact, nearest, rel_tol=1e-12):
        return nearest
    return math.ceil(exact)


def format_duration(us: int) -> str:
    """Return `us` microseconds as text in the largest whole unit, which :func:`parse_duration` can read."""
    for unit, size in (("d", 86_400 * SECOND_US), ("h", 3_600 * SECOND_US), ("m", 60 * SECOND_US)):
        if us and us % size == 0:
            return f"{us // size}{unit}"
    if us % SECOND_US == 0:
        return f"{us // SECOND_US}s"
    return f"{us // 1_000}ms" if us % 1_000 == 0 else f"{us}us"


def _unquoted(value: object) -> str:
    """Return a hint for a number given as text, for example from an environment variable; else ""."""
    return (
        "; this number is a text without a unit" if isinstance(value, str) and _PLAIN.fullmatch(value) else ""
    )


def _is_number(value: object) -> bool:
    """Return whether `value` is a finite int or float. True and False do not count as numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max
