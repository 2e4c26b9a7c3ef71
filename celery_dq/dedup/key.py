"""The dedup key of a call: calls with equal keys are duplicates.

A key is text, made of the task's name and typed values, so that ``1`` and ``"1"`` are two keys and ``f(1)``,
``f(x=1)`` and ``f(1, y=<its default>)`` are one. A key does not depend on the process: it uses no ``hash()``
and no object's ``repr``. A list and a tuple are equal, because serializers do not distinguish them.

A value counts as the worker reads it from the message. JSON sends a member of ``StrEnum`` or ``IntEnum`` as
its text or number, and a number that is a key of a dict as text.

Pure: it uses signatures and values, neither Celery nor Redis.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from string import Formatter
from typing import Any, TypeAlias
from uuid import UUID

from celery_dq.errors import ConfigurationError, InvalidKey

__all__ = ["MAX_KEY_BYTES", "AsSent", "Key", "MakeKey", "canonical"]

#: A longer key is cut, and a digest of the whole key is appended.
MAX_KEY_BYTES = 200

#: Limit of nesting, which also stops the walk through an object that contains itself.
MAX_DEPTH = 20

_REMEDY = "make the key work for every form of a call, or give the call the arguments that the key needs"
_quoted = json.JSONEncoder(ensure_ascii=False).encode
#: Types that every serializer sends as they are.
_SENT_AS_IS = frozenset((str, int, float, bool, type(None)))
#: Returns a value as the worker reads it from the message.
AsSent: TypeAlias = Callable[[Any], Any]
#: Makes the key of a call of its arguments, as :class:`Key` does.
MakeKey: TypeAlias = Callable[[Any, Any, AsSent], str]


def _as_is(value: Any) -> Any:
    return value


def canonical(value: Any, _depth: int = 0) -> str:
    """Return the typed, unambiguous text of a value.

    Raises:
        TypeError: the type has no canonical text; the message names the type.
    """
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if kind is int:
        return str(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, enum.Enum):
        return f"{kind.__name__}.{value.name}" if value.name else canonical(value.value, _depth)
    if kind is float:
        return repr(value)
    if _depth >= MAX_DEPTH:
        raise TypeError(f"nested more than {MAX_DEPTH} deep")
    deeper = _depth + 1
    if isinstance(value, Mapping):
        items = sorted((canonical(key, deeper), canonical(item, deeper)) for key, item in value.items())
        return "{" + ",".join(f"{key}:{item}" for key, item in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join([canonical(item, deeper) for item in value]) + "]"
    if isinstance(value, AbstractSet):
        return "set[" + ",".join(sorted(canonical(item, deeper) for item in value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"bytes({bytes(value).hex()})"
    if isinstance(value, (datetime, date, time)):
        return f"{'datetime' if isinstance(value, datetime) else type(value).__name__}({value.isoformat()})"
    if isinstance(value, (Decimal, Fraction, UUID)):
        return f"{type(value).__name__}({value})"
    if isinstance(value, timedelta):
        return f"timedelta({value.days},{value.seconds},{value.microseconds})"
    # Subclasses of the plain ones, such as a lazy or a safe string.
    for plain in (str, int, float):
        if isinstance(value, plain):
            return canonical(plain(value) if plain is not str else str.__str__(value))
    raise TypeError(f"of type {type(value).__module__}.{type(value).__qualname__}")


class Key:
    """Makes the dedup keys of the calls of one task.

    Args:
        name: prefix of every key, so that tasks do not share keys unless they share a name.
        run: the function of the task, with ``self`` already bound.
        rule: a template over the arguments (``"{sku}"``, ``"{order.id}-{region}"``), a callable that takes
            the arguments of the call and returns a value, or None for all arguments.

    Raises:
        ConfigurationError: the template is malformed or names an argument that the task does not take.
    """

    def __init__(
        self, name: str, run: Callable[..., Any], rule: str | Callable[..., Any] | None = None
    ) -> None:
        self.name = name
        self._signature = inspect.signature(run)
        self._rule = rule
        self._fields: list[tuple[str, str, str]] = []  # field, conversion, spec
        self._literal = ""
        self._only: tuple[str, int] | None = None
        if isinstance(rule, str):
            self._parse(rule)
        elif rule is not None and not callable(rule):
            raise ConfigurationError(
                f"task {name}: the dedup key {rule!r} is of type {type(rule).__name__}; give a template over "
                "the arguments such as '{sku}', or a callable that takes the arguments"
            )

    def _parse(self, template: str) -> None:
        try:
            parts = list(Formatter().parse(template))
        except ValueError as exc:
            raise self._misspelt(f"is not a format template ({exc})") from None
        literal = ""
        for text, field, spec, conversion in parts:
            literal += text
            if field is None:
                continue
            first = re.split(r"[.\[]", field, maxsplit=1)[0]
            if not first or first.isdigit():
                raise self._misspelt("has a field without a name; name the argument, as in '{sku}'")
            parameters = self._signature.parameters
            if first not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                raise self._misspelt(
                    f"names {first!r}, which the task does not take: {', '.join(parameters)}"
                )
            self._fields.append((field, conversion or "", spec or ""))
        # Text beside the fields distinguishes templates of tasks that share a name.
        self._literal = template if literal else ""
        self._only = self._shortcut(template)

    def _shortcut(self, template: str) -> tuple[str, int] | None:
        """Name and position of the parameter of a template ``"{sku}"``, which needs no binding; else None."""
        if len(self._fields) != 1 or self._literal or template != "{" + self._fields[0][0] + "}":
            return None
        for position, parameter in enumerate(self._signature.parameters.values()):
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                return None
            if parameter.name == self._fields[0][0]:
                return parameter.name, position
        return None

    def _misspelt(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"task {self.name}: the dedup key {self._rule!r} {problem}")

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], as_sent: AsSent = _as_is) -> str:
        """Return the key of a call.

        Args:
            args: the positional arguments.
            kwargs: the named arguments.
            as_sent: what the serializer of the message makes of a value. Arguments from a message need none.

        Raises:
            InvalidKey: an argument is missing or has no canonical form; the message names it.
        """
        if self._only is not None:
            name, position = self._only
            if position < len(args):
                value = args[position]
                # An int is the most frequent value, so it is converted without a call of _value.
                text = str(value) if type(value) is int else self._value(name, value, as_sent)
                return self._text(f"({name}={text})")
            if name in kwargs:
                return self._text(f"({name}={self._value(name, kwargs[name], as_sent)})")
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise InvalidKey(f"task {self.name}: no dedup key for this call: {exc}: {_REMEDY}") from exc
        if callable(self._rule):
            value = self._called(self._rule, args, kwargs)
            return self._text(f"(={self._value('what the key callable returned', value, as_sent)})")
        bound.apply_defaults()
        arguments = self._flat(bound.arguments)
        if self._rule is None:
            pairs = [f"{name}={self._value(name, value, as_sent)}" for name, value in arguments.items()]
        else:
            pairs = [f"{field[0]}={self._field(field, arguments, as_sent)}" for field in self._fields]
        return self._text(f"{self._literal}({','.join(pairs)})")

    def _called(self, rule: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return rule(*args, **kwargs)
        except Exception as exc:
            name = getattr(rule, "__qualname__", type(rule).__qualname__)
            raise InvalidKey(
                f"task {self.name}: the dedup key callable {name} failed for this call ({exc!r}): {_REMEDY}"
            ) from exc

    def _flat(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, with the sorted items of ``**kwargs`` behind them."""
        flat: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for name, value in bound.items():
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                extra = dict(sorted(value.items()))
            else:
                flat[name] = value
        return {**flat, **extra}

    def _field(self, field: tuple[str, str, str], arguments: Mapping[str, Any], as_sent: AsSent) -> str:
        path, conversion, spec = field
        formatter = Formatter()
        try:
            value, _ = formatter.get_field(path, (), arguments)
            if conversion or spec:
                value = format(formatter.convert_field(value, conversion or None), spec)
        except Exception as exc:  # attributes and items of the arguments may run any code
            raise InvalidKey(
                f"task {self.name}: the dedup key {self._rule!r} cannot be filled from this call ({exc!r}): "
                f"{_REMEDY}"
            ) from exc
        return self._value(path, value, as_sent)

    def _value(self, name: str, value: Any, as_sent: AsSent) -> str:
        try:
            return canonical(value if type(value) in _SENT_AS_IS else as_sent(value))
        except (TypeError, RecursionError) as exc:
            raise InvalidKey(
                f"task {self.name}: {name} is {exc} and has no canonical form: name an attribute that "
                f"identifies it, as in key='{{{name}.id}}', or give a callable that returns str, numbers or "
                "lists of them"
            ) from None

    def _text(self, call: str) -> str:
        text = self.name + call
        if text.isascii() and len(text) <= MAX_KEY_BYTES:
            return text
        raw = text.encode("utf-8", "backslashreplace")
        if len(raw) <= MAX_KEY_BYTES:
            return raw.decode()
        digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
        return raw[: MAX_KEY_BYTES - 40].decode("utf-8", "ignore") + "…" + digest
