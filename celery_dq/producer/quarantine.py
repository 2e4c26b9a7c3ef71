"""The messages in a file of the quarantine, as far as they can be read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from celery_dq.errors import CorruptSegment
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.segment import pack_header, read_header, scan

__all__ = ["QuarantineContents", "read_contents"]


class QuarantineContents(NamedTuple):
    """The readable messages of a file, and the reason why the rest cannot be read.

    Attributes:
        destination: Lane of the messages, as the sender takes it; "" when the file has no header.
        messages: The readable messages, in order.
        problem: Why the rest cannot be read; "" when all of the file can.
        rest: A file with the rest; b"" when there is none.
    """

    destination: str
    messages: Sequence[BufferedMessage]
    problem: str
    rest: bytes


def read_contents(data: bytes) -> QuarantineContents:
    """Read the bytes of a file."""
    try:
        header, start, seed = read_header(data)
    except CorruptSegment as exc:
        return QuarantineContents("", (), str(exc), data)
    found = scan(data, start, seed)
    messages = []
    for sequence, _, payload in found.records:
        end = 1 + payload[0]  # the length of the id
        messages.append(BufferedMessage(sequence, payload[1:end], payload[end:]))
    rest = pack_header(header)[0] + found.damaged if found.problem else b""
    return QuarantineContents(header.lane, messages, found.problem, rest)
