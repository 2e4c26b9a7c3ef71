"""Serializers of items: JSON, text, bytes, or a custom one."""

from __future__ import annotations

import json
from typing import Any, Protocol

from celery_dq.errors import ConfigurationError, CorruptRecord, InvalidMessage

__all__ = ["BytesSerializer", "JsonSerializer", "Serializer", "TextSerializer", "serializer_of"]


class Serializer(Protocol):
    """Converts items to bytes and back. Several threads use one serializer."""

    def serialize(self, item: Any) -> bytes:
        """Convert `item` to bytes. The caller of ``put`` receives any exception."""

    def deserialize(self, data: bytes) -> Any:
        """Convert bytes to an item.

        Raises:
            CorruptRecord: The bytes are not a serialized item.
        """


class JsonSerializer:
    """JSON in UTF-8, without spaces."""

    def serialize(self, item: Any) -> bytes:
        """Convert `item` to JSON."""
        try:
            return json.dumps(item, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidMessage(
                f"item {item!r:.200} cannot be written as JSON ({error}): use another serializer"
            ) from None

    def deserialize(self, data: bytes) -> Any:
        """Parse the JSON."""
        try:
            return json.loads(data)
        except ValueError as error:
            raise CorruptRecord(f"an item is not valid JSON: {error}") from None


class TextSerializer:
    """Text in UTF-8, as Java's ``String.getBytes(UTF_8)`` writes it."""

    def serialize(self, item: Any) -> bytes:
        """Encode the text in UTF-8."""
        if not isinstance(item, str):
            raise InvalidMessage(f"item {item!r:.200} is not a str: use another serializer than 'text'")
        return item.encode()

    def deserialize(self, data: bytes) -> str:
        """Decode the text."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CorruptRecord(f"an item is not valid UTF-8: {error}") from None


class BytesSerializer:
    """Bytes, unchanged."""

    def serialize(self, item: Any) -> bytes:
        """Return the same bytes."""
        if not isinstance(item, bytes | bytearray | memoryview):
            raise InvalidMessage(f"item {item!r:.200} is not bytes: use another serializer than 'bytes'")
        return bytes(item)

    def deserialize(self, data: bytes) -> bytes:
        """Return the same bytes."""
        return data


def serializer_of(given: Serializer | str) -> Serializer:
    """Return `given` if it is an object, or the serializer named ``json``, ``text`` or ``bytes``.

    Raises:
        ConfigurationError: No serializer has this name.
    """
    if not isinstance(given, str):
        return given
    if given == "json":
        return JsonSerializer()
    if given == "text":
        return TextSerializer()
    if given == "bytes":
        return BytesSerializer()
    raise ConfigurationError(
        f"serializer = {given!r} is unknown: use 'json', 'text', 'bytes' or an object with serialize() and "
        "deserialize()"
    )
