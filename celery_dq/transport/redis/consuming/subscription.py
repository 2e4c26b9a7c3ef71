"""The state that a fetcher keeps for each queue that its channel consumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_dq.transport.redis.store.queue import Queue

#: Shortest back-off, in seconds, after a claim found eligible messages but none for this channel.
MIN_BACKOFF_S = 0.02
#: Longest back-off, in seconds. It is reached only while the channel runs a suspect and finds only suspects.
MAX_BACKOFF_S = 1.0


@dataclass(eq=False, slots=True)
class Subscription:
    """A queue that the channel consumes.

    Attributes:
        queue: The queue.
        hungry: Whether a message of the queue may be eligible.
        appointment: Monotonic time of the next look that the claim script assigned to this process; None
            without one.
        relied_on: Whether the other consumers wait for this process to look at the queue: after it took a
            wake-up, when its next look is due, or while the result of an earlier claim is unknown.
        rest_s: Length of the next back-off, in seconds.
        rest_until: Monotonic end of the back-off; 0.0 without one.
        free: Free pool slots at the last claim. The back-off ends early when more slots are free.
        look_at: Monotonic time at which the tick must run in any case; None without one.
        limit: Returns the maximum number of messages to claim; None without a limit of its own.
        claimed: Called after each claim, when its messages are delivered or the claim has failed.
    """

    queue: Queue
    may_have_work: bool = True
    next_look_at: float | None = None
    is_relied_on: bool = True
    backoff_s: float = MIN_BACKOFF_S
    backoff_until: float = 0.0
    free_at_last_claim: int = 0
    wake_at: float | None = None
    claim_limit: Callable[[], int] | None = None
    on_claimed: Callable[[], None] | None = None

    def back_off(self, now: float, suspect_runs: bool) -> None:
        """Back off: the eligible messages are suspects, or their tenants are at their concurrency.

        Args:
            now: Monotonic time.
            suspect_runs: Whether the channel runs a suspect. The next back-off is then twice as long.
        """
        self.backoff_until = now + self.backoff_s
        if suspect_runs:
            # Each claim inspects all other suspects, and the running one may take hours.
            self.backoff_s = min(2 * self.backoff_s, MAX_BACKOFF_S)

    def reset_backoff(self) -> None:
        """Reset the back-off: a message for this channel may be eligible."""
        self.backoff_s, self.backoff_until = MIN_BACKOFF_S, 0.0

    def is_backing_off(self, now: float, free: int) -> bool:
        """Return whether the queue is in its back-off, or its limit allows no message.

        Args:
            now: Monotonic time.
            free: Free pool slots now.
        """
        if self.claim_limit is not None and self.claim_limit() <= 0:
            return True
        return now < self.backoff_until and free <= self.free_at_last_claim
