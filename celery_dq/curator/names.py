"""The names of the nodes of each kind of queue, in Apache Curator's format, and their order.

=========  ==================================  ==========================================
kind       name                                order
=========  ==================================  ==========================================
plain      ``queue-0000000007``                sequence
id         ``queue-|<id>|0000000007``          sequence
priority   ``queue-1000000050000000007``       priority, sequence
delay      ``queue-|18BCFE56800|0000000007``   due time, sequence
simple     ``qn-0000000007``                   sequence
=========  ==================================  ==========================================

ZooKeeper appends the sequence: ten digits, or a negative number after the counter has wrapped around at 2³¹.
The part before the sequence is the *prefix*, which a requeued item keeps. Curator itself requeues an item
whose consumer has failed under a plain name, also in a priority or delay queue. There, the item comes first,
as in Java.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from celery_dq.errors import InvalidMessage, InvalidPriority

__all__ = [
    "DELAY",
    "ID",
    "PLAIN",
    "PRIORITY",
    "REQUEUED",
    "SIMPLE",
    "Grammar",
    "Place",
    "delay_prefix",
    "id_of",
    "id_prefix",
    "priority_prefix",
]

QUEUE = "queue-"
SEQUENCE = r"(\d{10}|-\d{9,10})"
REQUEUED_NAME = re.compile(rf"{QUEUE}{SEQUENCE}")
PRIORITIES = 2**32
#: Characters that ZooKeeper forbids in a name or that Curator uses as separators, and ambiguous codes.
FORBIDDEN = re.compile("[/|\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff]|%(?=[0-9A-Fa-f]{2})")
ENCODED = re.compile("(?:%[0-9A-F]{2})+")


#: The rank of an item that Curator has requeued without its priority or due time.
REQUEUED = -1


class Place(NamedTuple):
    """The position of a node in its queue.

    Attributes:
        rank: A lower rank is served first; nodes of equal rank are ordered by sequence.
        sequence: The sequence number.
        due_ms: Due time in milliseconds since 1970; 0 means at once.
    """

    rank: int
    sequence: int
    due_ms: int


class Grammar(NamedTuple):
    """The node names of one kind of queue.

    Attributes:
        kind: The kind of queue.
        pattern: Matches a name, with groups for the mark and the sequence.
        rank: Computes the rank from the mark.
        reorders: Whether a new node may be served before older ones.
        delays: Whether the rank is a due time.
    """

    kind: str
    pattern: re.Pattern[str]
    rank: Callable[[str], int]
    reorders: bool = False
    delays: bool = False

    def place(self, name: str) -> Place | None:
        """Return the position of the node `name`; None if the name is not one of this kind of queue."""
        parts = self._parts(name)
        if parts is None:
            return None
        rank, sequence = parts
        return Place(rank, int(sequence), max(rank, 0) if self.delays else 0)

    def prefix(self, name: str) -> str:
        """Return the part of a name before the sequence, with the id, priority or due time.

        Raises:
            InvalidMessage: The name is not one of this kind of queue.
        """
        parts = self._parts(name)
        if parts is None:
            raise InvalidMessage(f"{name!r} is not the name of a node of a {self.kind} queue")
        return name.removesuffix(parts[1])

    def _parts(self, name: str) -> tuple[int, str] | None:
        """Return the rank and the sequence of a name; None if it is not one of this kind of queue."""
        match = self.pattern.fullmatch(name)
        if match is not None:
            return self.rank(match[1]), match[2]
        match = REQUEUED_NAME.fullmatch(name) if self.reorders else None
        return None if match is None else (REQUEUED, match[1])


def _no_rank(_text: str) -> int:
    return 0


def _hex(text: str) -> int:
    return int(text, 16)


PLAIN = Grammar("plain", re.compile(rf"{QUEUE}(){SEQUENCE}"), _no_rank)
ID = Grammar("id", re.compile(rf"{QUEUE}\|(.*)\|{SEQUENCE}", re.DOTALL), _no_rank)
# Negative priorities begin with 0, and their two's complements are in the same order.
PRIORITY = Grammar("priority", re.compile(rf"{QUEUE}([01][0-9A-F]{{8}}){SEQUENCE}"), _hex, reorders=True)
DELAY = Grammar(
    "delay", re.compile(rf"{QUEUE}\|([0-9A-Fa-f]{{1,15}})\|{SEQUENCE}"), _hex, reorders=True, delays=True
)
SIMPLE = Grammar("simple", re.compile(rf"qn-(){SEQUENCE}"), _no_rank)


def priority_prefix(priority: int) -> str:
    """Return the prefix of an item with this priority.

    Args:
        priority: A 32-bit integer; a lower number is served first.

    Raises:
        InvalidPriority: `priority` is not an integer, or out of range.
    """
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidPriority(f"priority = {priority!r} is not an integer: give an int")
    if not -PRIORITIES // 2 <= priority < PRIORITIES // 2:
        raise InvalidPriority(
            f"priority = {priority} is out of range: give {-PRIORITIES // 2} to {PRIORITIES // 2 - 1}"
        )
    return f"{QUEUE}{int(priority >= 0)}{priority % PRIORITIES:08X}"


def delay_prefix(due_ms: int) -> str:
    """Return the prefix of an item with a due time.

    Args:
        due_ms: Milliseconds since 1970; 0 means at once.

    Raises:
        InvalidMessage: `due_ms` is negative, or 2⁶⁰ or more.
    """
    if not 0 <= due_ms < 2**60:
        raise InvalidMessage(
            f"due = {due_ms} ms since 1970 is out of range: give an absolute time from 1970 on"
        )
    return f"{QUEUE}|{due_ms:X}|"


def id_prefix(item_id: str) -> str:
    """Return the prefix of an item with this id.

    Characters that a name cannot hold are percent-encoded in UTF-8. So is a ``%`` that would look like such a
    code. Curator itself replaces ``/`` and ``|`` by ``_`` and does not find such an id again.

    Raises:
        InvalidMessage: The id is empty, no str, or no valid Unicode.
    """
    return f"{QUEUE}|{encode_id(item_id)}|"


def encode_id(item_id: str) -> str:
    """Return `item_id` as it is written in a name; see :func:`id_prefix`."""
    if not isinstance(item_id, str) or not item_id:
        raise InvalidMessage(f"id = {item_id!r} is invalid: give a str that is not empty")
    try:
        item_id.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"id = {item_id!r} is not valid Unicode text: {error}") from None

    def code(match: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in match[0].encode())

    return FORBIDDEN.sub(code, item_id)


def id_of(name: str) -> str | None:
    """Return the id in the name of a node; None if the node is not one of an id queue."""
    match = ID.pattern.fullmatch(name)
    if match is None:
        return None
    return ENCODED.sub(
        lambda code: bytes.fromhex(code[0].replace("%", "")).decode(errors="replace"), match[1]
    )
