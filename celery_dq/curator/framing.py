"""The format of a node's data, byte for byte as Apache Curator writes it.

::

    00 01 00 01    version
    01             an item follows
    00 00 00 05    its length
    68 65 6c 6c 6f its bytes
    02             the end

The items of one node are published together and consumed together.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from celery_dq.errors import CorruptRecord

__all__ = ["frame", "unframe"]

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
