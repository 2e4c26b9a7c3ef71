"""What a fetcher keeps of each queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_dq.transport.redis.queue import Queue


@dataclass(eq=False, slots=True)
class Source:
    """A queue that the channel consumes.

    Attributes:
        queue: what is consumed.
        hungry: something may be eligible.
        appointment: monotonic time at which to look again; None without one.
        relied_on: others rely on this process to look, and it has not yet: it has taken a token, its
            appointment has come, or it is not known what a claim or an earlier connection has brought.
        rest_until: monotonic time until which a claim would find nothing for this channel …
        free: … unless more pool slots are free than at the last claim.
        look_at: monotonic time at which the tick must run, whatever else happens; None for none.
        limit: returns how many messages to claim at most; None without a limit of its own.
        claimed: called when a claim was answered and its messages are delivered.
    """

    queue: Queue
    hungry: bool = True
    appointment: float | None = None
    relied_on: bool = True
    rest_until: float = 0.0
    free: int = 0
    look_at: float | None = None
    limit: Callable[[], int] | None = None
    claimed: Callable[[], None] | None = None

    def rests(self, now: float, free: int) -> bool:
        """Return whether the last claim found nothing for us, and nothing has changed since."""
        if self.limit is not None and self.limit() <= 0:
            return True
        return now < self.rest_until and free <= self.free
