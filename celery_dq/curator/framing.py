"""The data of a node, byte for byte as Apache Curator writes it.

::

    00 01 00 01    version
    01             an item follows
    00 00 00 05    its length
    68 65 6c 6c 6f its bytes
    02             the end

Several items in one node are put together and consumed together.
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
    """The data of a node that holds `items`."""
    parts = [HEAD.pack(VERSION)]
    for item in items:
        parts += [bytes((ITEM,)), HEAD.pack(len(item)), item]
    return b"".join([*parts, bytes((END,))])


def unframe(data: bytes) -> list[bytes]:
    """The items of a node.

    Raises:
        CorruptRecord: Its data was not written by a queue, or not to the end.
    """
    try:
        (version,) = HEAD.unpack_from(data)
        if version != VERSION:
            raise CorruptRecord(f"version {version:#010x} of a queue's node; expected {VERSION:#010x}")
        items, at = [], HEAD.size
        while data[at] == ITEM:
            (length,) = HEAD.unpack_from(data, at + 1)
            at += 1 + HEAD.size
            if length < 0 or at + length > len(data):
                raise CorruptRecord(f"an item of {length} bytes at {at}, and the node has {len(data)} bytes")
            items.append(data[at : at + length])
            at += length
        if data[at] != END:
            raise CorruptRecord(f"byte {data[at]:#04x} at {at} of a queue's node; expected 0x01 or 0x02")
    except (struct.error, IndexError):
        raise CorruptRecord(f"a queue's node ends in the middle, after {len(data)} bytes") from None
    return items
