"""The compact form in which a message's headers and properties are stored.

A Celery message carries some thirty headers and properties. In almost all messages, most of them have their
default value (``shadow=None``, ``retries=0`` …) or repeat a field of the record. Those are left out, and a
bit mask records them, so that :func:`unpack` restores exactly the arguments of :func:`pack`: no key is added,
and ``0`` never turns into ``False``.

The body is not part of the envelope; it is stored raw beside it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from kombu.utils.json import JSONEncoder, loads as loads_with_types

from celery_dq.errors import CorruptRecord, InvalidMessage, described

#: (mapping, key, value that is left out). The order is part of the stored format: new rows go to the end, old
#: ones stay.
SILENT: tuple[tuple[str, str, Any], ...] = (
    ("headers", "lang", "py"),
    ("headers", "shadow", None),
    ("headers", "eta", None),
    ("headers", "expires", None),
    ("headers", "group", None),
    ("headers", "group_index", None),
    ("headers", "retries", 0),
    ("headers", "timelimit", [None, None]),
    ("headers", "parent_id", None),
    ("headers", "argsrepr", "()"),
    ("headers", "kwargsrepr", "{}"),
    ("headers", "ignore_result", False),
    ("headers", "ignore_result", True),
    ("headers", "replaced_task_nesting", 0),
    ("headers", "stamped_headers", None),
    ("headers", "stamps", {}),
    ("properties", "delivery_mode", 2),
    ("properties", "delivery_mode", 1),
    ("properties", "reply_to", None),
    ("properties", "priority", 0),
)

_HEADERS = tuple(
    (1 << bit, key, value) for bit, (where, key, value) in enumerate(SILENT) if where == "headers"
)
_PROPERTIES = tuple(
    (1 << bit, key, value) for bit, (where, key, value) in enumerate(SILENT) if where == "properties"
)
#: Bits for a ``root_id`` and a ``correlation_id`` that repeat the task id.
_ROOT_IS_ID = 1 << len(SILENT)
_CORRELATION_IS_ID = 1 << (len(SILENT) + 1)
#: Bit for content type and encoding: JSON in UTF-8.
_PLAIN_JSON = 1 << (len(SILENT) + 2)

_dumps: Callable[[Any], str] = json.JSONEncoder(
    separators=(",", ":"), ensure_ascii=False, check_circular=False, default=JSONEncoder().default
).encode


def pack(
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    content_type: str | None,
    content_encoding: str | None,
) -> bytes:
    """Return the stored form of a message without its body.

    Args:
        headers: Application headers, with values that kombu's JSON can encode.
        properties: Properties to store. The caller has removed those that the transport sets at delivery.
        content_type: Content type of the body, such as ``application/json``.
        content_encoding: Content encoding of the body, such as ``utf-8`` or ``binary``.

    Returns:
        The envelope, JSON in UTF-8.

    Raises:
        InvalidMessage: A value cannot be encoded as JSON, is nested too deeply or contains itself.
    """
    left = dict(headers)
    kept = dict(properties)
    mask = _drop(left, _HEADERS) | _drop(kept, _PROPERTIES)
    task_id = left.get("id")
    if isinstance(task_id, str):
        if left.get("root_id") == task_id:
            del left["root_id"]
            mask |= _ROOT_IS_ID
        if kept.get("correlation_id") == task_id:
            del kept["correlation_id"]
            mask |= _CORRELATION_IS_ID
    parts: list[Any] = [mask, left, kept, content_type, content_encoding]
    if content_type == "application/json" and content_encoding == "utf-8":
        parts = [mask | _PLAIN_JSON, left, kept]
    try:
        return _dumps(parts).encode("utf-8", "surrogatepass")
    except Exception as exc:
        raise InvalidMessage(f"a header or property cannot be written as JSON: {described(exc)}") from exc


def more_headers(headers: Mapping[str, Any]) -> str:
    """Return the text that adds headers to the last header of an envelope.

    Args:
        headers: At least one header, none of which Celery itself writes.

    Raises:
        TypeError: A value cannot be encoded as JSON.
        ValueError: A value cannot be encoded as JSON.
        RecursionError: A value is nested too deeply or contains itself.
    """
    return "," + _dumps(dict(headers))[1:-1]


def unpack(envelope: bytes) -> tuple[dict[str, Any], dict[str, Any], str | None, str | None]:
    """Return headers, properties, content type and content encoding.

    Raises:
        CorruptRecord: The bytes are not an envelope that :func:`pack` made.
    """
    try:
        text = envelope.decode("utf-8", "surrogatepass")
        parts = loads_with_types(text) if '"__type__"' in text else json.loads(text)
        mask, headers, properties = parts[0], parts[1], parts[2]
        if mask & _PLAIN_JSON:
            content_type: str | None = "application/json"
            content_encoding: str | None = "utf-8"
        else:
            content_type, content_encoding = parts[3], parts[4]
        _restore(headers, mask, "headers")
        _restore(properties, mask, "properties")
        if mask & _ROOT_IS_ID:
            headers["root_id"] = headers["id"]
        if mask & _CORRELATION_IS_ID:
            properties["correlation_id"] = headers["id"]
        if type(headers) is not dict or type(properties.get("delivery_info", headers)) is not dict:
            raise ValueError("headers, properties and delivery info are mappings")
        if not (_is_text(content_type) and _is_text(content_encoding)):
            raise ValueError("content type and encoding are texts")
    except Exception as exc:
        raise CorruptRecord.of("the envelope of a stored message", exc) from exc
    return headers, properties, content_type, content_encoding


def _is_text(value: Any) -> bool:
    return value is None or type(value) is str


def _drop(values: dict[str, Any], rows: tuple[tuple[int, str, Any], ...]) -> int:
    mask = 0
    for bit, key, silent in rows:
        if key in values and _same(values[key], silent):
            del values[key]
            mask |= bit
    return mask


@functools.lru_cache(maxsize=64)  # the messages of one task have the same mask, or one of a few
def _silent_values(mask: int, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that *mask* leaves out of a mapping, and those of them that are containers."""
    rows = _HEADERS if where == "headers" else _PROPERTIES
    values = {key: silent for bit, key, silent in rows if mask & bit}
    return values, {key: silent for key, silent in values.items() if isinstance(silent, (list, dict))}


def _restore(values: dict[str, Any], mask: int, where: str) -> None:
    silent, containers = _silent_values(mask, where)
    values.update(silent)
    for key, container in containers.items():
        # Each message has its own containers, because a consumer may change them.
        values[key] = container.copy()


def _same(value: Any, silent: Any) -> bool:
    if isinstance(silent, list):
        # Celery passes a tuple or a list; JSON makes a list of either.
        return isinstance(value, (list, tuple)) and list(value) == silent
    return type(value) is type(silent) and bool(value == silent)
