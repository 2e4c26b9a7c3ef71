"""The kinds of value an option may have, and how a wrong one is refused.

A :class:`Setting` is one option: its name, kind, default, bounds and meaning.
The tables of all of them are in :mod:`celery_dq.options.sections`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from celery_dq.duration import format_duration, parse_duration
from celery_dq.errors import ConfigurationError

__all__ = ["Kind", "Setting", "refuse_unknown"]


class Kind(Enum):
    """What type of value an option takes, said as an error would."""

    TEXT = "a text"
    FLAG = "True or False"
    WHOLE = "a whole number"
    DURATION = "a duration"
    TABLE = "a dict"


@dataclass(frozen=True)
class Setting:
    """One option and what it accepts.

    :param name: as the user writes it, e.g. ``dq_lease``.
    :param kind: the type of its value.
    :param default: the checked value when the user says nothing; durations in microseconds.
    :param meaning: one sentence, for the documentation.
    :param low: smallest value; durations in microseconds.
    :param high: largest value; durations in microseconds.
    :param choices: the only texts allowed; empty allows any.
    :param optional: whether None is a value of its own (and not an error).
    :param zero_is_off: whether 0 is allowed below `low`, meaning "off".
    """

    name: str
    kind: Kind
    default: Any
    meaning: str
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    zero_is_off: bool = False

    def check(self, value: object, *, where: str | None = None) -> Any:
        """`value` in the form the rest of celery-dq uses: durations become whole microseconds.

        Raises :exc:`~celery_dq.errors.ConfigurationError` naming `where` (by default the
        option), the value and what would be accepted.
        """
        name = where or self.name
        if value is None and self.optional:
            return None
        if self.kind is Kind.DURATION:
            return self._in_range(name, value, parse_duration(value, option=name))
        if self.kind is Kind.WHOLE and isinstance(value, int) and not isinstance(value, bool):
            return self._in_range(name, value, value)
        if self.kind is Kind.TEXT and isinstance(value, str):
            return self._chosen(name, value)
        if self.kind is Kind.FLAG and isinstance(value, bool):
            return value
        if self.kind is Kind.TABLE and isinstance(value, Mapping):
            return value
        or_none = " or None" if self.optional else ""
        raise ConfigurationError(f"{name} = {value!r} is not {self.kind.value}{or_none}")

    def _in_range(self, name: str, given: object, value: int) -> int:
        if value == 0 and self.zero_is_off:
            return value
        if self.low is not None and value < self.low:
            off = ", or 0 for off" if self.zero_is_off else ""
            raise ConfigurationError(
                f"{name} = {given!r} is too small: give {self._show(self.low)} or more{off}"
            )
        if self.high is not None and value > self.high:
            raise ConfigurationError(f"{name} = {given!r} is too large: give {self._show(self.high)} or less")
        return value

    def _show(self, bound: int) -> str:
        return format_duration(bound) if self.kind is Kind.DURATION else str(bound)

    def _chosen(self, name: str, value: str) -> str:
        if self.choices and value not in self.choices:
            known = " or ".join(map(repr, self.choices))
            raise ConfigurationError(f"{name} = {value!r} is not {known}{_suggest(value, self.choices)}")
        return value


def refuse_unknown(
    given: Iterable[object], known: Iterable[str], *, where: str, what: str = "option"
) -> None:
    """Raise :exc:`~celery_dq.errors.ConfigurationError` for the first of `given` that is not `known`."""
    names = tuple(known)
    for name in given:
        if name not in names:
            hint = _suggest(str(name), names) or f"; known are {', '.join(sorted(names))}"
            raise ConfigurationError(f"{where}: there is no {what} {name!r}{hint}")


def _suggest(value: str, known: Iterable[str]) -> str:
    close = get_close_matches(value, tuple(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
