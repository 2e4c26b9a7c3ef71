"""What a fetcher keeps of each queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_dq.transport.redis.queue import Queue

#: Seconds until a queue is looked at again whose eligible messages are not for this channel.
REST_SECONDS = 0.02
#: Seconds that this may grow to while the channel runs a suspect, and finds nothing but suspects.
LONGEST_REST_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Source:
    """A queue that the channel consumes.

    Attributes:
        queue: what is consumed.
        hungry: something may be eligible.
        appointment: monotonic time at which to look again; None without one.
        relied_on: others rely on this process to look, and it has not yet: it has taken a token, its
            appointment has come, or it is not known what a claim or an earlier connection has brought.
        rest_s: how long it rests when the next claim finds nothing for this channel either, in seconds.
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
    rest_s: float = REST_SECONDS
    rest_until: float = 0.0
    free: int = 0
    look_at: float | None = None
    limit: Callable[[], int] | None = None
    claimed: Callable[[], None] | None = None

    def rest(self, now: float, suspect_runs: bool) -> None:
        """What is eligible is not for this channel now: at its concurrency, or suspect."""
        self.rest_until = now + self.rest_s
        if suspect_runs:
            # A claim looks at each of the others, and nobody knows how long this one runs.
            self.rest_s = min(2 * self.rest_s, LONGEST_REST_SECONDS)

    def rise(self) -> None:
        """There may be something for this channel."""
        self.rest_s, self.rest_until = REST_SECONDS, 0.0

    def rests(self, now: float, free: int) -> bool:
        """Return whether the last claim found nothing for us, and nothing has changed since."""
        if self.limit is not None and self.limit() <= 0:
            return True
        return now < self.rest_until and free <= self.free
