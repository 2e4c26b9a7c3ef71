"""What a fetcher keeps of each queue, and of each call that is not answered yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery_dq.transport.redis.ledger import Burial, Held
from celery_dq.transport.redis.partition import Call
from celery_dq.transport.redis.queue import Queue


@dataclass(eq=False, slots=True)
class Source:
    """A queue that the channel consumes.

    Attributes:
        queue: what is consumed.
        hungry: something may be eligible.
        appointment: monotonic time at which to look again; None without one.
        claimed_at: monotonic time of the last claim that was answered.
        limit: returns how many messages to claim at most; None without a limit of its own.
        claimed: called when a claim was answered and its messages are delivered.
    """

    queue: Queue
    hungry: bool = True
    appointment: float | None = None
    claimed_at: float = 0.0
    limit: Callable[[], int] | None = None
    claimed: Callable[[], None] | None = None


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
