"""The answers of the scripts that no other store gives, and how each script's reply is read.

The functions read replies, which are bytes or, from a client that decodes, str.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

from celery_dq.transport.partition_replies import (
    ClaimedEntry,
    ClaimReply,
    HeartbeatReply,
    OutgoingRecord,
    PurgeReply,
    PushReply,
    PushStatus,
    Reaped,
)
from celery_dq.transport.redis.store.partition_map import PartitionMap

Edited: TypeAlias = Literal["waiting", "delayed", "blocked", "other", "expires", "none"]
Cancellation: TypeAlias = Literal["waiting", "delayed", "claimed", "discarded", "tombstone", "none"]


class Brought(NamedTuple):
    """The answer to the quota of a worker's settings, and the quota before.

    Attributes:
        status: ``set``, ``same`` (it was in force), ``older`` (it was replaced a short while ago, so
            nothing was changed) or ``moved`` (the partition has another map, so nothing was changed).
        before: the packed quota that was in force before; None without one.
        by: the worker that had applied that one.
        at_us: when, in µs.
    """

    status: Literal["set", "same", "older", "moved"]
    before: bytes | None
    by: str
    at_us: int


class Declared(NamedTuple):
    """The map of a queue, and whether the call has stored it."""

    homes: PartitionMap
    is_new: bool


class PauseReply(NamedTuple):
    """The pause of a tenant or a queue after a call.

    Attributes:
        changed: a pause has begun, changed its end, or ended.
        since_us: when it began, µs; 0 when there is none.
        until_us: when it ends by itself, µs; 0 for never.
    """

    changed: bool
    since_us: int
    until_us: int


#: Why nothing was changed: the end of the pause is over, or the partition has another map than the caller.
NotPaused: TypeAlias = Literal["over", "moved"]


class MoveReply(NamedTuple):
    """The number of messages that a chunk moved or removed, and of those left for the next chunk."""

    moved: int
    remaining: int


def read_text(reply: Any) -> str:
    """Return a string of a reply."""
    return reply.decode("utf-8", "surrogateescape") if isinstance(reply, bytes) else str(reply)


def read_binary(reply: Any) -> bytes:
    """Return the bytes of a reply."""
    return reply if isinstance(reply, bytes) else str(reply).encode("utf-8", "surrogateescape")


def read_flag(reply: Any) -> bool:
    """Return whether the reply is 1."""
    return int(reply) == 1


_PUSH_STATUS: tuple[PushStatus, ...] = get_args(PushStatus)


def read_push_reply(reply: Any, messages: Sequence[OutgoingRecord]) -> list[PushReply]:
    """Return the verdict on each of these messages, which were pushed."""
    if type(reply) is int:  # each was accepted under its task id
        return [PushReply("accepted", read_text(task_id)) for _, task_id, _ in messages]
    return [PushReply(_PUSH_STATUS[int(text[0])], *text[1:].split("\0")) for text in map(read_text, reply)]


def read_claim_reply(reply: Any) -> ClaimReply:
    """Return the answer to a claim."""
    more, appointment, stale, mark, lost = map(int, reply[:5])
    delay = None if appointment < 0 else appointment / 1e6
    entries, lost_up_to = read_entries(reply[5:]), None if lost < 0 else lost
    return ClaimReply(more == 1, delay, stale, mark == 1, entries, mark == 2, lost_up_to, mark > 0, mark == 4)


def read_entries(reply: Any) -> list[ClaimedEntry]:
    """Return the messages of a claim: three strings each."""
    entries = []
    for position in range(0, len(reply), 3):
        claim, deliveries, reason = read_text(reply[position + 1]).split("|", 2)
        record = read_binary(reply[position + 2])
        crashes, returned, resource = int(deliveries or 0), deliveries != "", ""
        if reason.startswith("|"):
            reason, resource = "", reason[1:]
        entries.append(
            ClaimedEntry(read_text(reply[position]), claim, crashes, reason, record, returned, resource)
        )
    return entries


def read_heartbeat_reply(reply: Any) -> HeartbeatReply:
    """Return the answer to a heartbeat."""
    alive = int(reply[0])
    next_end_s = math.inf if reply[3] in (b"-", "-") else int(reply[3]) / 1e6
    texts = [read_text(each) for each in reply[6:]]
    lost = tuple(map(Reaped, texts[::3], texts[1::3], [each == "1" for each in texts[2::3]]))
    homes = read_text(reply[4])
    return HeartbeatReply(
        alive == 1, int(reply[1]), alive < 0, int(reply[2]), next_end_s, homes, lost, int(reply[5])
    )


def read_cancellations(reply: Any) -> list[Cancellation]:
    """Return the answer for each task of a cancellation."""
    return [cast(Cancellation, read_text(each)) for each in reply]


def read_edited(reply: Any) -> Edited:
    """Return the state of an edited message."""
    return cast(Edited, read_text(reply))


def read_brought(reply: Any) -> Brought:
    """Return the answer to the quota of a worker's settings."""
    status = cast(Literal["set", "same", "older", "moved"], read_text(reply[0]))
    return Brought(status, read_binary(reply[1]) or None, read_text(reply[2]), int(reply[3]))


def read_pause_reply(reply: Any) -> PauseReply | NotPaused:
    """Return the pause, or why nothing was changed."""
    changed, since_us, until_us = map(int, reply)
    if changed < 0:
        return "over" if changed == -1 else "moved"
    return PauseReply(changed == 1, since_us, until_us)


def read_move_reply(reply: Any) -> MoveReply:
    """Return the answer of a script that moves a chunk."""
    return MoveReply(int(reply[0]), int(reply[1]))


def read_purge_reply(reply: Any) -> PurgeReply:
    """Return the answer of a script that removes a chunk."""
    return PurgeReply(int(reply[0]), int(reply[1]) == 1)


def read_declared(reply: Any) -> Declared:
    """Return the map that a partition has stored."""
    stored, is_new, spreads = reply
    return Declared(PartitionMap.parse(read_text(stored), read_text(spreads)), int(is_new) == 1)


def read_dead_lettered(reply: Any) -> Literal["dead", "stale", "no record"]:
    """Return whether a dead letter was made."""
    code = int(reply)
    return "dead" if code == 1 else "stale" if code == 0 else "no record"


def read_replayed(reply: Any) -> str | None:
    """Return the message id of a dead letter that was sent again, or None."""
    text = read_text(reply)
    return text[1:] if text[0] == "1" else None


def read_waits(reply: Any) -> list[float | None]:
    """Return waiting times in seconds; None where no message waits."""
    return [None if wait < 0 else wait / 1e6 for wait in map(int, reply)]


class BacklogsReply(NamedTuple):
    """The answer of the script ``backlogs``.

    Attributes:
        size: number of tenants of the place.
        tenants: how many of them this answer counts.
        runnable: number of their messages that may start now.
        largest: the tenants with the largest backlogs, each with its number of waiting messages.
    """

    size: int
    tenants: int
    runnable: int
    largest: tuple[tuple[str, int], ...]

    @classmethod
    def read(cls, reply: Any) -> BacklogsReply:
        """Return the answer in the form of this class."""
        size, tenants, runnable, *largest = reply
        # A name that is not UTF-8 is shown, and is not a name of a tenant that other calls find.
        names = [each.decode("utf-8", "backslashreplace") for each in largest[::2]]
        return cls(
            int(size), int(tenants), int(runnable), tuple(zip(names, map(int, largest[1::2]), strict=True))
        )


def read_pairs(reply: Any) -> dict[str, str]:
    """Return alternating names and values as a dict."""
    texts = [read_text(each) for each in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


class FenceReply(NamedTuple):
    """The answer of the script ``fence``.

    Attributes:
        accepted: the partition has not seen a higher fencing token before; with token 0, no leader lives.
        epoch: the fencing token that holds now.
        remaining: number of other consumers that still have messages in flight: call again.
    """

    accepted: bool
    epoch: int
    remaining: int


def read_fence_reply(reply: Any) -> FenceReply:
    """Parse the reply of ``fence``."""
    return FenceReply(int(reply[0]) == 1, int(reply[1]), int(reply[2]))
