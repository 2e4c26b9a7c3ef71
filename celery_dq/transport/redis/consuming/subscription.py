"""The state that a fetcher keeps for each queue that its channel consumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from celery_dq.transport.redis.in_flight.in_flight_message import InFlightMessage
from celery_dq.transport.redis.store.queue import Queue

#: Shortest back-off, in seconds, after a claim found eligible messages but none for this channel.
MIN_BACKOFF_S = 0.02
#: Longest back-off, in seconds. It is reached only while the channel runs a suspect and finds only suspects.
MAX_BACKOFF_S = 1.0


class WaitGroup:
    """Queues that share one wait for wake-ups."""

    #: Number of queues that may have work.
    busy = 0


@dataclass(eq=False, slots=True)
class Subscription:
    """A queue that the channel consumes.

    Attributes:
        queue: The queue.
        may_have_work: Whether a message of the queue may be eligible. Set by
            :class:`~celery_dq.transport.redis.consuming.ready_queues.ReadyQueues`.
        is_claiming: Whether a claim is under way.
        is_woken: Whether a wake-up has come during the claim, which may have run before.
        next_look_at: Monotonic time of the next look that the claim script assigned to this process; None
            without one.
        backoff_s: Length of the next back-off, in seconds.
        backoff_until: Monotonic end of the back-off; 0.0 without one.
        free_at_last_claim: Free pool slots at the last claim; 0 if it could use none of them. The back-off
            ends early when more slots are free.
        wake_at: Monotonic time at which the tick must run in any case; None without one.
        claim_limit: Returns the maximum number of messages to claim; None without a limit of its own.
        on_claimed: Called after each claim, when its messages are delivered or the claim has failed.
        needs_lead: Whether the next claim must be one that may bring a suspect, because the last one has
            passed over all eligible messages.
        waits: The group of queues that share one wait for wake-ups.
        timer_at: Time for which the queue is planned; infinity without one.
        has_limits: Whether a tenant may have a limit, as of the last claim.
    """

    queue: Queue
    claim_limit: Callable[[], int] | None = None
    on_claimed: Callable[[], None] | None = None
    may_have_work: bool = False
    is_claiming: bool = False
    is_woken: bool = False
    next_look_at: float | None = None
    backoff_s: float = MIN_BACKOFF_S
    backoff_until: float = 0.0
    free_at_last_claim: int = 0
    wake_at: float | None = None
    needs_lead: bool = False
    waits: WaitGroup | None = None
    timer_at: float = math.inf
    has_limits: bool = True

    def is_end_awaited(self, finishes: Iterable[InFlightMessage]) -> bool:
        """Return whether the end of one of these messages may let another one start."""
        return bool(self.has_limits or self.queue.token or any(held.has_lock for held in tuple(finishes)))

    def next_time(self) -> float:
        """Return the earliest monotonic time at which the queue needs a tick; infinity without one."""
        times = (self.next_look_at, self.backoff_until or None, self.wake_at)
        return min((at for at in times if at is not None), default=math.inf)

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
