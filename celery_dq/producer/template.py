"""The quick half of a task message: what differs from call to call, written as Celery writes it.

Each function returns what Celery's own code returns for the same arguments, or None where that is not certain
at a glance; the caller then goes Celery's way. The tests compare the two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from kombu import serialization
from kombu.utils import json as kombu_json

__all__ = ["json_body", "new_id", "plain_args", "plain_kwargs", "quoted"]

#: Longer ones are cut by Celery, in its own way.
MAX_REPR = 500

#: JSON text of a string, quotes included, not restricted to ASCII.
quoted = encode_basestring

_encode = kombu_json.JSONEncoder().encode
_EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_EMBED_END = f", {_encode(_EMBED)}]"


def new_id() -> str:
    """A random UUID of version 4, as text."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def _plain(value: Any) -> str | None:
    kind = type(value)
    if kind is int or kind is bool or kind is float or value is None:
        return str(value)
    if kind is str and len(value) < MAX_REPR:
        return "'" + value.replace("'", "\\'") + "'" if "'" in value else f"'{value}'"
    return None


def plain_args(args: Any) -> str | None:
    """The ``argsrepr`` of positional arguments that are plain numbers and texts."""
    if not args:
        return "()"
    if type(args) is not tuple and type(args) is not list:
        return None
    parts = []
    for value in args:
        text = _plain(value)
        if text is None:
            return None
        parts.append(text)
    inner = ", ".join(parts)
    if len(inner) > MAX_REPR:
        return None
    if type(args) is list:
        return f"[{inner}]"
    return f"({inner},)" if len(args) == 1 else f"({inner})"


def plain_kwargs(kwargs: Any) -> str | None:
    """The ``kwargsrepr`` of named arguments that are plain numbers and texts."""
    if not kwargs:
        return "{}"
    if type(kwargs) is not dict:
        return None
    parts = []
    for name, value in kwargs.items():
        key, text = _plain(name), _plain(value)
        if key is None or text is None:
            return None
        parts.append(f"{key}: {text}")
    inner = ", ".join(parts)
    return None if len(inner) > MAX_REPR else f"{{{inner}}}"


def json_body(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The JSON body of a task message without callbacks, errbacks, chain or chord."""
    return _encode([args or (), kwargs or {}])[:-1] + _EMBED_END


def json_is_kombus() -> bool:
    """Whether the serializer ``json`` is still the one that kombu registers."""
    try:
        encoders: Any = serialization.registry._encoders  # type: ignore[attr-defined]  # not in its stubs
        return encoders["json"].encoder is kombu_json.dumps
    except (KeyError, AttributeError):
        return False
