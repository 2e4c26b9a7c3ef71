"""What the scripts answer, and what they take besides numbers: typed, and read from replies.

A reply is bytes or, from a client that decodes, str.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

_PushStatus = Literal["seen", "accepted", "discarded", "declined", "blocked", "following", "refused"]
Cancellation: TypeAlias = Literal["waiting", "delayed", "claimed", "discarded", "tombstone", "none"]


class Tag(NamedTuple):
    """One delivery of a message."""

    claim: str
    id: str


class Outgoing(NamedTuple):
    """A message to push: the producer's sequence (ascending; 0 without a producer), task id, record."""

    sequence: int
    id: str
    record: bytes


class Pushed(NamedTuple):
    """What became of a pushed message; ``status`` is ``seen`` when this sequence was here before.

    One with a dedup key may be ``blocked`` behind another, ``following`` it (it will be settled with the
    other's result), ``declined`` (not kept) or ``refused`` (it should follow, but too many do).
    ``covering`` is then the message that covers it or is ahead of it, ``replaced`` one that gave up its
    place.
    """

    status: _PushStatus
    id: str
    covering: str = ""
    replaced: str = ""


class ClaimedEntry(NamedTuple):
    """A message that was claimed.

    ``deliveries``: how many consumers were lost with it. ``returned``: it was delivered before, whether
    that ended in a crash or not. ``reason`` is empty unless it is delivered only to be discarded.
    """

    id: str
    claim: str
    deliveries: int
    reason: str
    record: bytes
    returned: bool = False

    @property
    def tag(self) -> Tag:
        """What settles, finishes or releases this delivery."""
        return Tag(self.claim, self.id)


class Claimed(NamedTuple):
    """The answer to a claim.

    ``more``: something may be served right now. ``appointment_s``: this consumer has to call again after so
    many seconds, because it was given the next due time to keep; None when it was not. ``stale``: tags that
    were too old. ``suspect``: the only entry has crashed a worker before and should run alone. ``alive``: the
    consumer had its lease until now; if not, what it held before is with others. ``fenced``: the
    queue has a leader, and the consumer is not it.
    """

    more: bool
    appointment_s: float | None
    stale: int
    suspect: bool
    entries: list[ClaimedEntry]
    alive: bool = True
    fenced: bool = False


class Renewed(NamedTuple):
    """The answer to a heartbeat.

    ``alive``: the lease had not been lost. ``reaped``: messages taken back from lost consumers.
    ``fenced``: as in a claim; nothing was done. ``claim``: the number of the last claim before this; what was
    claimed later is not lost. ``next_end_s``: seconds until there may be something to take back, infinite
    when the caller did not ask.
    """

    alive: bool
    reaped: int
    fenced: bool = False
    claim: int = 0
    next_end_s: float = math.inf


class Moved(NamedTuple):
    """How many messages a chunk moved or removed, and how many are left for the next chunk."""

    moved: int
    remaining: int


class Purged(NamedTuple):
    """How many messages a chunk removed, and whether there are more."""

    removed: int
    more: bool


def read_text(reply: Any) -> str:
    """Return a string of a reply."""
    return reply.decode("utf-8", "surrogateescape") if isinstance(reply, bytes) else str(reply)


def read_binary(reply: Any) -> bytes:
    """Return the bytes of a reply."""
    return reply if isinstance(reply, bytes) else str(reply).encode("utf-8", "surrogateescape")


def read_flag(reply: Any) -> bool:
    """Return a 1 as True."""
    return int(reply) == 1


def read_nothing(reply: Any) -> None:
    """Nothing is to be learnt from the reply."""
    return


_PUSH_STATUS: tuple[_PushStatus, ...] = get_args(_PushStatus)


def read_pushed(reply: Any) -> list[Pushed]:
    """Return what became of each message of a push."""
    texts = [read_text(each) for each in reply]
    return [Pushed(_PUSH_STATUS[int(text[0])], *text[1:].split("\0")) for text in texts]


def read_claimed(reply: Any) -> Claimed:
    """Return what a claim brought."""
    more, appointment, stale, suspect, alive = (int(each) for each in reply[:5])
    delay = None if appointment < 0 else appointment / 1e6
    return Claimed(more == 1, delay, stale, suspect == 1, read_entries(reply[5:]), alive == 1, suspect == 2)


def read_entries(reply: Any) -> list[ClaimedEntry]:
    """Return the messages of a claim: three strings each."""
    entries = []
    for position in range(0, len(reply), 3):
        claim, deliveries, reason = read_text(reply[position + 1]).split("|", 2)
        record = read_binary(reply[position + 2])
        crashes, returned = int(deliveries or 0), deliveries != ""
        entries.append(ClaimedEntry(read_text(reply[position]), claim, crashes, reason, record, returned))
    return entries


def read_renewed(reply: Any) -> Renewed:
    """Return what a heartbeat found."""
    alive = int(reply[0])
    next_end_s = math.inf if reply[3] in (b"-", "-") else int(reply[3]) / 1e6
    return Renewed(alive == 1, int(reply[1]), alive < 0, int(reply[2]), next_end_s)


def read_cancellations(reply: Any) -> list[Cancellation]:
    """Return what became of each task of a cancellation."""
    return [cast(Cancellation, read_text(each)) for each in reply]


def read_moved(reply: Any) -> Moved:
    """Return what a chunk moved."""
    return Moved(int(reply[0]), int(reply[1]))


def read_purged(reply: Any) -> Purged:
    """Return what a chunk removed."""
    return Purged(int(reply[0]), int(reply[1]) == 1)


def read_dead_lettered(reply: Any) -> Literal["dead", "stale", "no record"]:
    """Return whether a dead letter was made."""
    code = int(reply)
    return "dead" if code == 1 else "stale" if code == 0 else "no record"


def read_replayed(reply: Any) -> str | None:
    """Return the message id of what was sent again, if anything was."""
    text = read_text(reply)
    return text[1:] if text[0] == "1" else None


def read_pairs(reply: Any) -> dict[str, str]:
    """Return names and values that stand in turn."""
    texts = [read_text(each) for each in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))
