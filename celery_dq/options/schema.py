"""The declaration of a setting, and the check of its value.

A setting is declared once, as a field of a *section*, a frozen dataclass: ``lease_us: int =
setting("dq_lease", …)``. The check of the user's value, the table of the documentation and the field follow
from that. The kind of the value follows from the type of the field, and from the unit in its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeVar
from urllib.parse import urlsplit

from celery_dq.duration import format_duration, parse_duration
from celery_dq.errors import ConfigurationError
from celery_dq.shown import shown_setting, why_unreadable

__all__ = [
    "Kind",
    "Setting",
    "checked",
    "fields_of_settings",
    "read_section",
    "refuse_unknown",
    "refuse_unreadable_url",
    "section",
    "setting",
    "settings_of",
]

T = TypeVar("T")


class Kind(Enum):
    """The type of an option's value, with the words of an error text."""

    TEXT = "a text"
    FLAG = "True or False"
    WHOLE = "a whole number"
    DURATION = "a duration"
    TABLE = "a dict"


_KINDS = {"str": Kind.TEXT, "Literal": Kind.TEXT, "bool": Kind.FLAG, "int": Kind.WHOLE}


@dataclass(frozen=True)
class Setting:
    """One option and its accepted values.

    Attributes:
        name: Name as the user writes it, e.g. ``dq_lease``.
        kind: Type of its value.
        default: Value without a setting, in checked form; durations in microseconds.
        meaning: One sentence, for the documentation.
        low: Smallest value; durations in microseconds.
        high: Largest value; durations in microseconds.
        choices: The allowed texts; empty allows any text.
        optional: Whether None is allowed.
        zero_is_off: Whether 0 is allowed below `low`, with the meaning "off".
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
        """Return `value` in checked form, in which durations are whole microseconds.

        Args:
            value: The value that the user gave.
            where: Name for the error; default the name of the option.

        Raises:
            ConfigurationError: The value is not accepted. The text names the accepted values.
        """
        name = where or self.name
        if value is None and self.optional:
            return None
        if self.kind is Kind.DURATION:
            return self._in_range(name, value, self._duration(name, value))
        if self.kind is Kind.WHOLE and isinstance(value, int) and not isinstance(value, bool):
            return self._in_range(name, value, value)
        if self.kind is Kind.TEXT and isinstance(value, str):
            return self._chosen(name, value)
        if self.kind is Kind.FLAG and isinstance(value, bool):
            return value
        if self.kind is Kind.TABLE and isinstance(value, Mapping):
            return value
        or_none = " or None" if self.optional else ""
        raise ConfigurationError(
            f"{name} = {shown_setting(value)} is not {self.kind.value}{or_none}{self._bounds}"
        )

    def _duration(self, name: str, value: object) -> int:
        try:
            return parse_duration(value, option=name)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}{self._bounds}") from None

    def _in_range(self, name: str, given: object, value: int) -> int:
        if value == 0 and self.zero_is_off:
            return value
        off = ", or 0 for off" if self.zero_is_off else ""
        if self.low is not None and value < self.low:
            most = "" if self.high is None else f", {self._show(self.high)} at most"
            raise ConfigurationError(
                f"{name} = {given!r} is too small: give {self._show(self.low)} or more{off}{most}"
            )
        if self.high is not None and value > self.high:
            least = "" if self.low is None else f", {self._show(self.low)} at least"
            raise ConfigurationError(
                f"{name} = {given!r} is too large: give {self._show(self.high)} or less{least}{off}"
            )
        return value

    @property
    def _bounds(self) -> str:
        """The range, as the end of an error text; "" when each value of the kind is allowed."""
        if self.low is None:
            return ""
        high = " up" if self.high is None else f" to {self._show(self.high)}"
        return f"; from {self._show(self.low)}{high}" + (", or 0 for off" if self.zero_is_off else "")

    def _show(self, bound: int) -> str:
        return format_duration(bound) if self.kind is Kind.DURATION else str(bound)

    def _chosen(self, name: str, value: str) -> str:
        if self.choices and value not in self.choices:
            known = " or ".join(map(repr, self.choices))
            raise ConfigurationError(f"{name} = {value!r} is not {known}{_suggest(value, self.choices)}")
        return value


def setting(
    name: str, default: Any, meaning: str, *, unset: Any = None, hashed: bool = True, **rules: Any
) -> Any:
    """Declare a field of a section together with its setting.

    Args:
        name: See :class:`Setting`, as the other arguments.
        default: See there; also the default of the field.
        meaning: See there.
        unset: Default of a field whose value has another form than its setting, such as a tuple from a dict.
        hashed: Whether the field is a part of the section's hash.
        rules: ``low``, ``high``, ``choices`` and ``zero_is_off``.
    """
    declared = {"name": name, "default": default, "meaning": meaning, **rules}
    default = default if unset is None else unset
    return field(default=default, hash=None if hashed else False, metadata={"setting": declared})


def section(kind: type[Any], *names: str) -> Any:
    """Declare a field that is a section of its own.

    Args:
        kind: The class of the section.
        names: The fields of it that an app sets; default all.
    """
    return field(default_factory=kind, metadata={"section": kind, "names": names})


def fields_of_settings(kind: type[Any]) -> Mapping[str, Setting]:
    """Return the settings of a section by the name of the field, without those of sections in it."""
    return {each.name: _setting_of(each) for each in fields(kind) if "setting" in each.metadata}


def _setting_of(option: Field[Any]) -> Setting:
    kind, _, none = str(option.type).partition(" | ")
    # A field of another type is made of a dict.
    value = Kind.DURATION if option.name.endswith("_us") else _KINDS.get(kind.partition("[")[0], Kind.TABLE)
    return Setting(kind=value, optional=bool(none), **option.metadata["setting"])


def settings_of(kind: type[Any]) -> tuple[Setting, ...]:
    """Return the settings of a section and of the sections in it, in the order of the fields."""
    found: list[Setting] = []
    own = fields_of_settings(kind)
    for option in fields(kind):
        if option.name in own:
            found.append(own[option.name])
        elif inner := option.metadata.get("section"):
            inner_settings = fields_of_settings(inner)
            found += [inner_settings[name] for name in option.metadata["names"] or inner_settings]
    return tuple(found)


def checked(
    own: Mapping[str, Setting], given: Mapping[str, Any], where: str, prefix: str = ""
) -> dict[str, Any]:
    """Return the checked values of the fields whose settings a dict of the user has.

    Args:
        own: The settings by the name of the field.
        given: The dict.
        where: Name of the dict, for the error.
        prefix: Beginning of the names of the settings that the keys of the dict do not have.

    Raises:
        ConfigurationError: A value is not accepted.
    """
    keys = {each.name.removeprefix(prefix): name for name, each in own.items()}
    return {
        name: own[name].check(given[key], where=f"{where}[{key!r}]")
        for key, name in keys.items()
        if key in given
    }


def read_section(kind: type[T], values: Mapping[str, Any], **others: Any) -> T:
    """Make a section.

    Args:
        kind: Its class.
        values: The checked values of settings, by name; others have their defaults.
        others: Values of fields that do not follow from one setting.
    """
    read = {name: values[each.name] for name, each in fields_of_settings(kind).items() if each.name in values}
    for each in fields(kind):  # type: ignore[arg-type]  # a section is a dataclass
        if "section" in each.metadata and each.name not in others:
            read[each.name] = read_section(each.metadata["section"], values)
    return kind(**{**read, **others})


def refuse_unknown(
    given: Iterable[object], known: Iterable[str], *, where: str, what: str = "option"
) -> None:
    """Check that all names are known.

    Args:
        given: The names to check.
        known: The known names.
        where: Place of the names, for the error.
        what: Kind of the names, for the error.

    Raises:
        ConfigurationError: A name is not known. The text names the closest known one.
    """
    names = tuple(known)
    for name in given:
        if name not in names:
            hint = _suggest(str(name), names) or f"; known are {', '.join(sorted(names))}"
            raise ConfigurationError(f"{where}: there is no {what} {name!r}{hint}")


def refuse_unreadable_url(name: str, url: str) -> None:
    """Raise :exc:`~celery_dq.errors.ConfigurationError` for the URL of a Redis that no client can read."""
    try:
        urlsplit(url).port  # noqa: B018 - reads it
    except ValueError as exc:
        raise ConfigurationError(f"{name} cannot be read: {why_unreadable(url, exc)}") from None


def _suggest(value: str, known: Iterable[str]) -> str:
    close = get_close_matches(value, tuple(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
