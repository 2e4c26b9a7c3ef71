"""The names of the nodes of each kind of queue, as Apache Curator spells them, and their order.

=========  ==================================  ==========================================
kind       name                                order
=========  ==================================  ==========================================
plain      ``queue-0000000007``                sequence
id         ``queue-|<id>|0000000007``          sequence
priority   ``queue-1000000050000000007``       priority, sequence
delay      ``queue-|18BCFE56800|0000000007``   due time, sequence
simple     ``qn-0000000007``                   sequence
=========  ==================================  ==========================================

The sequence is what ZooKeeper appends: ten digits, or a negative number once it has rolled over at 2³¹.
Everything before it is the *prefix*, which a requeued item keeps.
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
PRIORITIES = 2**32
#: What ZooKeeper does not take in a name, besides what Curator separates with.
FORBIDDEN = re.compile("[/|\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff]|%(?=[0-9A-Fa-f]{2})")
ENCODED = re.compile("(?:%[0-9A-F]{2})+")


class Place(NamedTuple):
    """Where a node stands in its queue."""

    #: The lower, the earlier; equal ones go by sequence.
    rank: int
    sequence: int
    #: Milliseconds since 1970 until which it must wait; 0: not at all.
    due_ms: int


class Grammar(NamedTuple):
    """How the nodes of one kind of queue are named."""

    kind: str
    pattern: re.Pattern[str]
    rank: Callable[[str], int]
    #: Whether what comes later may have to be served earlier.
    reorders: bool = False
    delays: bool = False

    def place(self, name: str) -> Place | None:
        """Where the node called `name` stands; None for a node that does not belong to such a queue."""
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        rank = self.rank(match[1])
        return Place(rank, int(match[2]), rank if self.delays else 0)

    def prefix(self, name: str) -> str:
        """What stands before the sequence; it holds the id, the priority or the due time."""
        match = self.pattern.fullmatch(name)
        if match is None:
            raise InvalidMessage(f"{name!r} is not the name of a node of a {self.kind} queue")
        return name[: match.start(2)]


def _no_rank(_text: str) -> int:
    return 0


def _hex(text: str) -> int:
    return int(text, 16)


def _priority_rank(text: str) -> int:
    # Negative ones begin with 0, and their two's complement grows with them.
    return int(text, 16)


PLAIN = Grammar("plain", re.compile(rf"{QUEUE}(){SEQUENCE}"), _no_rank)
ID = Grammar("id", re.compile(rf"{QUEUE}\|(.*)\|{SEQUENCE}", re.DOTALL), _no_rank)
PRIORITY = Grammar(
    "priority", re.compile(rf"{QUEUE}([01][0-9A-F]{{8}}){SEQUENCE}"), _priority_rank, reorders=True
)
DELAY = Grammar(
    "delay", re.compile(rf"{QUEUE}\|([0-9A-Fa-f]{{1,15}})\|{SEQUENCE}"), _hex, reorders=True, delays=True
)
SIMPLE = Grammar("simple", re.compile(rf"qn-(){SEQUENCE}"), _no_rank)


def priority_prefix(priority: int) -> str:
    """The prefix of an item with this priority, of 32 bits; lower is served first."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidPriority(f"priority = {priority!r} is no whole number")
    if not -PRIORITIES // 2 <= priority < PRIORITIES // 2:
        raise InvalidPriority(
            f"priority = {priority} is out of range: {-PRIORITIES // 2} to {PRIORITIES // 2 - 1}"
        )
    return f"{QUEUE}{int(priority >= 0)}{priority % PRIORITIES:08X}"


def delay_prefix(due_ms: int) -> str:
    """The prefix of an item that must wait until `due_ms`, milliseconds since 1970; 0 for not at all."""
    if not 0 <= due_ms < 2**60:
        raise InvalidMessage(
            f"due = {due_ms} ms since 1970 is out of range: give an absolute time from 1970 on"
        )
    return f"{QUEUE}|{due_ms:X}|"


def id_prefix(item_id: str) -> str:
    """The prefix of an item with this id.

    Characters that the name cannot hold are percent-encoded, in UTF-8; so is a ``%`` that would be taken
    for such a code. Curator itself replaces ``/`` and ``|`` by ``_`` and does not find such an id again.
    """
    return f"{QUEUE}|{encode_id(item_id)}|"


def encode_id(item_id: str) -> str:
    """`item_id` as it stands in a name."""
    if not isinstance(item_id, str) or not item_id:
        raise InvalidMessage(f"id = {item_id!r} is unusable: give a str that is not empty")
    try:
        item_id.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"id = {item_id!r} is no Unicode text: {error}") from None

    def code(match: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in match[0].encode())

    return FORBIDDEN.sub(code, item_id)


def id_of(name: str) -> str | None:
    """The id of the node called `name`; None if it is not of an id queue."""
    match = ID.pattern.fullmatch(name)
    if match is None:
        return None
    return ENCODED.sub(
        lambda code: bytes.fromhex(code[0].replace("%", "")).decode(errors="replace"), match[1]
    )
