"""What a fetcher sends, and what the answer is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from celery_dq.transport.redis.ledger import Burial, Held
from celery_dq.transport.redis.partition import Call
from celery_dq.transport.redis.process import TELL_LIMIT, Process, bury, release, tags
from celery_dq.transport.redis.queue import Queue


@dataclass(eq=False, slots=True)
class Source:
    """A queue that the channel consumes.

    Attributes:
        queue: what is consumed.
        hungry: something may be eligible.
        appointment: monotonic time at which to look again; None without one.
        claimed_at: monotonic time of the last claim that was answered.
        rest_until: monotonic time until which a claim would find nothing for this channel …
        free: … unless more pool slots are free than at the last claim.
    """

    queue: Queue
    hungry: bool = True
    appointment: float | None = None
    claimed_at: float = 0.0
    rest_until: float = 0.0
    free: int = 0

    def rests(self, now: float, free: int) -> bool:
        """Return whether the last claim found nothing for us, and nothing has changed since."""
        return now < self.rest_until and free <= self.free


@dataclass(eq=False, slots=True)
class Sent:
    """A script on its way: what its answer is for, and what it carried."""

    call: Call[Any]
    queue: Queue
    source: Source | None
    want: int
    sent_at: float
    settles: list[Held] = field(default_factory=list)
    finishes: list[Held] = field(default_factory=list)
    releases: list[tuple[str, Held]] = field(default_factory=list)
    burials: list[Burial] = field(default_factory=list)
    #: The keeper has given up on the answer, and sees to what the claim took.
    disowned: bool = False


def errands(process: Process, queue: Queue, now: float) -> Iterator[Sent]:
    """Yield what the ledger has to tell *queue*'s partition, taking it out of the ledger."""
    ledger, name, partition = process.ledger, queue.key, queue.partition
    settles, finishes = ledger.take(name, TELL_LIMIT)
    if settles:
        call: Call[Any] = partition.settle(process.consumer, tags(settles))
        yield Sent(call, queue, None, 0, now, settles=settles)
    if finishes:
        call = partition.finish(process.consumer, tags(finishes))
        yield Sent(call, queue, None, 0, now, finishes=finishes)
    releases = ledger.take_releases(name, TELL_LIMIT)
    for mode in sorted({mode for mode, _ in releases}):
        same = [held for how, held in releases if how == mode]
        call = release(process, queue, mode, same)
        yield Sent(call, queue, None, 0, now, releases=[(mode, held) for held in same])
    while (burial := ledger.take_burial(name)) is not None:
        yield Sent(bury(process, queue, burial), queue, None, 0, now, burials=[burial])
