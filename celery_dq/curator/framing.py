"""Items to the data of a node and back: serializers, and the framing of Apache Curator, byte for byte.

::

    00 01 00 01    version
    01             an item follows
    00 00 00 05    its length
    68 65 6c 6c 6f its bytes
    02             the end

The items of one node are published together and consumed together.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from celery_dq.errors import ConfigurationError, CorruptRecord, InvalidMessage
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)

VERSION = 0x00010001
ITEM = 1
END = 2
HEAD = struct.Struct(">i")


def frame(items: Sequence[bytes]) -> bytes:
    """Return the data of a node with these items."""
    parts = [HEAD.pack(VERSION)]
    for item in items:
        parts += [bytes((ITEM,)), HEAD.pack(len(item)), item]
    return b"".join([*parts, bytes((END,))])


def unframe(data: bytes) -> list[bytes]:
    """Return the items in the data of a node.

    Raises:
        CorruptRecord: The data is truncated or not in Curator's format.
    """
    try:
        (version,) = HEAD.unpack_from(data)
        if version != VERSION:
            raise CorruptRecord(f"a queue's node has version {version:#010x}; expected {VERSION:#010x}")
        items, at = [], HEAD.size
        while data[at] == ITEM:
            (length,) = HEAD.unpack_from(data, at + 1)
            at += 1 + HEAD.size
            if length < 0 or at + length > len(data):
                raise CorruptRecord(
                    f"a queue's node of {len(data)} bytes has an item of {length} bytes at offset {at}"
                )
            items.append(data[at : at + length])
            at += length
        if data[at] != END:
            raise CorruptRecord(
                f"a queue's node has byte {data[at]:#04x} at offset {at}; expected 0x01 or 0x02"
            )
    except (struct.error, IndexError):
        raise CorruptRecord(f"a queue's node is truncated after {len(data)} bytes") from None
    return items


#: Maximum number of unreadable nodes that are logged, each once.
MANY = 20


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


class Decoder:
    """Decodes the items of nodes, and logs each node that it cannot decode once.

    Args:
        path: The folder of the queue, for logs.
        serializer: Decodes one item.
        framed: Whether the data of a node is in Curator's framing; otherwise it is one item.
    """

    def __init__(self, path: str, serializer: Serializer, *, framed: bool = True) -> None:
        self._path = path
        self._serializer = serializer
        self._framed = framed
        self._reported: set[str] = set()

    def raw(self, data: bytes) -> list[bytes]:
        """Return the items of a node as bytes."""
        return unframe(data) if self._framed else [data]

    def items(self, data: bytes) -> list[Any]:
        """Return the decoded items of a node."""
        return [self._serializer.deserialize(each) for each in self.raw(data)]

    def readable(self, name: str, data: bytes) -> bool:
        """Whether this consumer can decode a node; if not, the node is logged and stays in the queue."""
        try:
            self.items(data)
        except Exception as error:
            if not isinstance(error, CorruptRecord):
                logger.exception(
                    "The serializer raised an error for node %s/%s; the node stays in the queue.",
                    self._path,
                    name,
                    extra={"event": "curator_serializer_failed"},
                )
            self.pass_over(name, str(error))
            return False
        return True

    def pass_over(self, name: str, why: str) -> None:
        """Log, once per node, that this consumer leaves a node in the queue."""
        if name not in self._reported and len(self._reported) < MANY:
            self._reported.add(name)
            logger.error(
                "Node %s/%s cannot be read (%s); it stays in the queue for a consumer that can read it.",
                self._path,
                name,
                why,
                extra={"event": "curator_node_unreadable"},
            )
