"""The arguments and answers of the calls of :class:`~celery_dq.transport.partition_store.PartitionStore`.

Each store of messages gives these answers; a field with a default may stay away.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, TypeAlias

from celery_dq.shown import shown_name

#: How a message is released; see ``PartitionStore.release``.
ReleaseMode: TypeAlias = Literal["unstarted", "requeue", "crashed"]
PushStatus: TypeAlias = Literal[
    "seen", "accepted", "discarded", "declined", "blocked", "following", "refused", "misrouted", "full"
]


class DeliveryTag(NamedTuple):
    """One delivery of a message."""

    claim: str
    id: str


@dataclass(frozen=True)
class PauseCause:
    """The task that has paused a tenant, by :class:`~celery_dq.Throttled`.

    Attributes:
        reason: its reason, "" for none.
        task: name of the task.
        task_id: id of the task.
    """

    reason: str
    task: str
    task_id: str

    def __str__(self) -> str:
        """Return a phrase for a table or a sentence."""
        why = f" ({self.reason})" if self.reason else ""
        return shown_name(f"task {self.task}[{self.task_id}] was throttled{why}")

    def pack(self) -> str:
        """Return the text that is stored with the pause."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, stored: bytes | str | None) -> PauseCause | None:
        """Return a stored cause; None without one, or when another program has written it."""
        try:
            found = json.loads(stored or "null")
            return cls(*(str(found[name]) for name in ("reason", "task", "task_id")))
        except (ValueError, TypeError, KeyError):
            return None


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
            partitions than the client knows, and nothing was stored. ``full``: as many messages of its tenant
            wait as may, and it was not stored; a push under the same sequence tries again.
        id: message id; the task id when it was seen or full.
        covering: the message that covers it or is ahead of it.
        replaced: the message that it has replaced.
        bound: for a full one, how many messages of its tenant may wait.
        waits: whether the publisher of a full one waits until there is room.
    """

    status: PushStatus
    id: str
    covering: str = ""
    replaced: str = ""
    bound: int = 0
    waits: bool = False


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
        needs_slot: a tenant with a concurrency limit has its turn, and the claim named no free slot for it.
    """

    more: bool
    next_look_s: float | None
    stale: int
    suspect: bool
    entries: list[ClaimedEntry]
    fenced: bool = False
    lost_up_to: int | None = None
    has_limits: bool = True
    needs_slot: bool = False

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
        homes: the map of the queue as text, as this partition has stored it; empty without one.
        lost: the reaped messages.
        set_aside: number of entries that were set aside, because another program had written them.
    """

    alive: bool
    reaped: int
    fenced: bool = False
    claim: int = 0
    next_end_s: float = math.inf
    homes: str = ""
    lost: tuple[Reaped, ...] = ()
    set_aside: int = 0


class PurgeReply(NamedTuple):
    """The number of messages that a chunk removed, and whether there are more."""

    removed: int
    more: bool
