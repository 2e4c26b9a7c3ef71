"""The answers of the scripts and the types of their arguments.

The functions read replies, which are bytes or, from a client that decodes, str.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

from celery_dq.transport.redis.store.partition_map import PartitionMap

_PushStatus = Literal[
    "seen", "accepted", "discarded", "declined", "blocked", "following", "refused", "misrouted"
]
Edited: TypeAlias = Literal["waiting", "delayed", "blocked", "other", "expires", "none"]
Cancellation: TypeAlias = Literal["waiting", "delayed", "claimed", "discarded", "tombstone", "none"]


class DeliveryTag(NamedTuple):
    """One delivery of a message."""

    claim: str
    id: str


class OutgoingRecord(NamedTuple):
    """A message to push: the producer's sequence (ascending; 0 without a producer), task id, record."""

    sequence: int
    id: str
    record: bytes


class PushReply(NamedTuple):
    """The verdict on a pushed message.

    Attributes:
        status: ``accepted``; ``discarded`` when its task was cancelled before; ``seen`` when the partition
            had the sequence before. A message with a dedup key may also be ``blocked`` behind another one,
            ``following`` (it will get the result of another one), ``declined`` (not kept) or ``refused`` (it
            should follow, but there are too many followers). ``misrouted``: the queue has another number of
            partitions than the client knows, and nothing was stored.
        id: message id; the task id when it was seen.
        covering: the message that covers it or is ahead of it.
        replaced: the message that it has replaced.
    """

    status: _PushStatus
    id: str
    covering: str = ""
    replaced: str = ""


class ClaimedEntry(NamedTuple):
    """A claimed message.

    Attributes:
        id: message id.
        claim: claim number.
        deliveries: how many consumers were lost with it.
        reason: why it is discarded; empty for a message that is to run.
        record: the message as stored.
        returned: it was delivered before, with or without a crash.
        resource: the resource that takes a message of a set; empty for other messages.
    """

    id: str
    claim: str
    deliveries: int
    reason: str
    record: bytes
    returned: bool = False
    resource: str = ""

    @property
    def tag(self) -> DeliveryTag:
        """The tag with which this delivery is settled, finished or released."""
        return DeliveryTag(self.claim, self.id)


class ClaimReply(NamedTuple):
    """The answer to a claim.

    Attributes:
        more: a message may be served now.
        next_look_s: seconds after which this consumer must claim again, because it has planned the next
            look; None when it has not.
        stale: number of stale tags.
        suspect: the only entry has crashed a worker before and should run alone.
        entries: the claimed messages.
        fenced: the queue has a leader, and the consumer is not the leader.
        lost_up_to: None when the consumer had its lease until now. Else other consumers may have the messages
            of its claims up to this number.
        has_limits: a tenant may have a limit, so that the end of one message may let another one start.
    """

    more: bool
    next_look_s: float | None
    stale: int
    suspect: bool
    entries: list[ClaimedEntry]
    fenced: bool = False
    lost_up_to: int | None = None
    has_limits: bool = True

    @property
    def alive(self) -> bool:
        """Whether the consumer had its lease until now."""
        return self.lost_up_to is None


class Reaped(NamedTuple):
    """A message that was reaped from a lost consumer; one that was ``settled`` does not run again."""

    consumer: str
    id: str
    settled: bool


class HeartbeatReply(NamedTuple):
    """The answer to a heartbeat.

    Attributes:
        alive: the lease had not been lost.
        reaped: number of messages that were reaped from lost consumers.
        fenced: as in a claim; nothing was done.
        claim: number of the last claim before this; messages of later claims are not lost.
        next_end_s: seconds until there may be messages to reap; infinite when the call was not to reap.
        homes: the map of the queue, as this partition has stored it; None without one.
        lost: the reaped messages.
    """

    alive: bool
    reaped: int
    fenced: bool = False
    claim: int = 0
    next_end_s: float = math.inf
    homes: PartitionMap | None = None
    lost: tuple[Reaped, ...] = ()


class Brought(NamedTuple):
    """The answer to the quota of a worker's settings, and the quota before.

    Attributes:
        status: ``set``, ``same`` (it was in force) or ``older`` (it was replaced a short while ago, so
            nothing was changed).
        before: the packed quota that was in force before; None without one.
        by: the worker that had applied that one.
        at_us: when, in µs.
    """

    status: Literal["set", "same", "older"]
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


class MoveReply(NamedTuple):
    """The number of messages that a chunk moved or removed, and of those left for the next chunk."""

    moved: int
    remaining: int


class PurgeReply(NamedTuple):
    """The number of messages that a chunk removed, and whether there are more."""

    removed: int
    more: bool


def read_text(reply: Any) -> str:
    """Return a string of a reply."""
    return reply.decode("utf-8", "surrogateescape") if isinstance(reply, bytes) else str(reply)


def read_binary(reply: Any) -> bytes:
    """Return the bytes of a reply."""
    return reply if isinstance(reply, bytes) else str(reply).encode("utf-8", "surrogateescape")


def read_flag(reply: Any) -> bool:
    """Return whether the reply is 1."""
    return int(reply) == 1


def read_nothing(reply: Any) -> None:
    """Ignore the reply."""
    return


_PUSH_STATUS: tuple[_PushStatus, ...] = get_args(_PushStatus)


def read_push_reply(reply: Any) -> list[PushReply]:
    """Return the verdict on each message of a push."""
    return [PushReply(_PUSH_STATUS[int(text[0])], *text[1:].split("\0")) for text in map(read_text, reply)]


def read_claim_reply(reply: Any) -> ClaimReply:
    """Return the answer to a claim."""
    more, appointment, stale, mark, lost = (int(each) for each in reply[:5])
    delay = None if appointment < 0 else appointment / 1e6
    entries, lost_up_to = read_entries(reply[5:]), None if lost < 0 else lost
    return ClaimReply(more == 1, delay, stale, mark == 1, entries, mark == 2, lost_up_to, mark > 0)


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
    texts = [read_text(each) for each in reply[5:]]
    lost = tuple(map(Reaped, texts[::3], texts[1::3], [each == "1" for each in texts[2::3]]))
    stored = read_text(reply[4])
    homes = PartitionMap.parse(stored) if stored else None
    return HeartbeatReply(alive == 1, int(reply[1]), alive < 0, int(reply[2]), next_end_s, homes, lost)


def read_cancellations(reply: Any) -> list[Cancellation]:
    """Return the answer for each task of a cancellation."""
    return [cast(Cancellation, read_text(each)) for each in reply]


def read_edited(reply: Any) -> Edited:
    """Return the state of an edited message."""
    return cast(Edited, read_text(reply))


def read_brought(reply: Any) -> Brought:
    """Return the answer to the quota of a worker's settings."""
    status = cast(Literal["set", "same", "older"], read_text(reply[0]))
    return Brought(status, read_binary(reply[1]) or None, read_text(reply[2]), int(reply[3]))


def read_pause_reply(reply: Any) -> PauseReply | None:
    """Return the pause, or None when its end is over already."""
    changed, since_us, until_us = map(int, reply)
    return None if changed < 0 else PauseReply(changed == 1, since_us, until_us)


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
        # A name that is not UTF-8 is shown, and is no name of a tenant that other calls find.
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
        accepted: the partition has not seen a higher fencing token before.
        epoch: the fencing token that holds now.
        remaining: number of other consumers that still have messages in flight: call again.
    """

    accepted: bool
    epoch: int
    remaining: int


def read_fence_reply(reply: Any) -> FenceReply:
    """Parse the reply of ``fence``."""
    return FenceReply(int(reply[0]) == 1, int(reply[1]), int(reply[2]))
