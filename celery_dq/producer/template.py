"""The parts of a task message that differ from call to call, in the form that Celery writes.

Each function returns the same text as Celery's own code for the same arguments. It returns None for arguments
that it does not handle; the caller then uses Celery's code. Tests compare the two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from json.encoder import (  # type: ignore[attr-defined]  # the first is not in its stubs
    c_make_encoder,
    encode_basestring,
    encode_basestring_ascii as encode_ascii,
)
from typing import Any

from kombu.utils import json as kombu_json

__all__ = ["EMBED", "BodyWriter", "Ids", "plain_args", "plain_kwargs", "quoted"]

#: Characters from which on Celery shortens a representation.
MAX_REPR = 500

#: Returns the JSON text of a string, with quotes and without escaping non-ASCII characters.
quoted = encode_basestring

_encode = kombu_json.JSONEncoder().encode
#: The part of a body that is for callbacks; a plain call has none.
EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_EMBED_END = f", {_encode(EMBED)}]"


class Ids:
    """A supply of random UUIDs of version 4, as text. Belongs to one process: a fork would repeat the ids."""

    def __init__(self) -> None:
        self._ready: list[str] = []

    def new(self) -> str:
        """Return the next id. Thread-safe."""
        try:
            return self._ready.pop()
        except IndexError:
            # One system call provides the random bytes for 256 ids.
            noise = os.urandom(16 * 256).hex()
            made = [_uuid4(noise[at : at + 32]) for at in range(0, len(noise), 32)]
            last = made.pop()
            self._ready.extend(made)
            return last


def _uuid4(digits: str) -> str:
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
    """Return the ``argsrepr`` of positional arguments; None unless all are plain numbers and texts."""
    if not args:
        return "()"
    if type(args) is not tuple and type(args) is not list:
        return None
    parts = []
    for value in args:
        kind = type(value)
        # The two most frequent types, without a function call.
        if kind is int:
            parts.append(str(value))
        elif kind is str and len(value) < MAX_REPR and "'" not in value:
            parts.append(f"'{value}'")
        else:
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
    """Return the ``kwargsrepr`` of named arguments; None unless all are plain numbers and texts."""
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


class BodyWriter:
    """Writes the JSON body of a task message without callbacks, errbacks, chain or chord.

    The text is the same as from ``json.dumps`` with kombu's encoder, which creates a new C encoder for each
    call.
    """

    def __init__(self) -> None:
        self._write: Any = None
        if c_make_encoder is not None:
            settings = kombu_json.JSONEncoder()
            self._write = c_make_encoder(
                {}, settings.default, encode_ascii, None, ": ", ", ", False, False, True
            )

    def write(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the body. After an exception of the encoder the caller must use a new writer."""
        both = [args or (), kwargs or {}]
        text = _encode(both) if self._write is None else "".join(self._write(both, 0))
        return text[:-1] + _EMBED_END
