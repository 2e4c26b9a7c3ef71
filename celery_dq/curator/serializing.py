"""How items become bytes: JSON, text, bytes, or one's own."""

from __future__ import annotations

import json
from typing import Any, Protocol

from celery_dq.errors import ConfigurationError, CorruptRecord, InvalidMessage

__all__ = ["BytesSerializer", "JsonSerializer", "Serializer", "TextSerializer", "serializer_of"]


class Serializer(Protocol):
    """What turns items into bytes and back. Shared by threads."""

    def serialize(self, item: Any) -> bytes:
        """The bytes of `item`; raises what the caller of ``put`` shall see."""

    def deserialize(self, data: bytes) -> Any:
        """The item; raises :exc:`~celery_dq.errors.CorruptRecord` for bytes that are none."""


class JsonSerializer:
    """JSON in UTF-8, without spaces."""

    def serialize(self, item: Any) -> bytes:
        """The JSON of `item`."""
        try:
            return json.dumps(item, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidMessage(f"{item!r:.200} cannot be put as JSON: {error}; give a serializer") from None

    def deserialize(self, data: bytes) -> Any:
        """What the JSON says."""
        try:
            return json.loads(data)
        except ValueError as error:
            raise CorruptRecord(f"no JSON: {error}") from None


class TextSerializer:
    """str in UTF-8: what Java's ``String.getBytes(UTF_8)`` writes."""

    def serialize(self, item: Any) -> bytes:
        """The text in UTF-8."""
        if not isinstance(item, str):
            raise InvalidMessage(f"{item!r:.200} is no str: give another serializer than 'text'")
        return item.encode()

    def deserialize(self, data: bytes) -> str:
        """The text."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CorruptRecord(f"no text: {error}") from None


class BytesSerializer:
    """Bytes as they are."""

    def serialize(self, item: Any) -> bytes:
        """The same bytes."""
        if not isinstance(item, bytes | bytearray | memoryview):
            raise InvalidMessage(f"{item!r:.200} is no bytes: give another serializer than 'bytes'")
        return bytes(item)

    def deserialize(self, data: bytes) -> bytes:
        """The same bytes."""
        return data


def serializer_of(given: Serializer | str) -> Serializer:
    """`given`, or the one of that name: ``json``, ``text`` or ``bytes``."""
    if not isinstance(given, str):
        return given
    if given == "json":
        return JsonSerializer()
    if given == "text":
        return TextSerializer()
    if given == "bytes":
        return BytesSerializer()
    raise ConfigurationError(
        f"serializer = {given!r} is unknown: 'json', 'text', 'bytes' or an object with serialize, deserialize"
    )
