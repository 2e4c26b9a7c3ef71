"""How much a claim may ask for: messages ahead of the free slots, a share for each queue, and discards.

In a worker, a window limits the messages ahead. Where callbacks run in the delivering thread, its pace does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_dq.clock import Clock
from celery_dq.protocols import WorkerCapacity

#: Maximum number of messages per claim, so that a script stays short.
MAX_CLAIM = 200
#: Number of messages by which one late message shrinks the window. Most messages are then in time.
LATE_WEIGHT = 4
#: Maximum number of claims under way.
MAX_CLAIMS = 16
#: Messages that the claims under way bring together, by the mean of the last ones. More claims would spread
#: the acks over more queues, and each call carries those of one queue.
BATCH = 16
#: Messages that each of several claims asks for, at least, so that it pays for itself.
MIN_SHARE = 8
#: Seconds that the discards of one claim may take: a new message waits for that long.
SLICE_S = 0.001
#: Discards of one claim before one was measured, and the most for any claim: receiving one takes time, too.
FIRST_DISCARDS, MOST_DISCARDS = 4, 8
#: Seconds from one claim of discards to the next by the same consumer, at least and at most.
MIN_REST_S, MAX_REST_S = 0.002, 1.0
#: Length of a rest, in times of the seconds that the discards of the claim take.
REST_SHARE = 2
#: Maximum number of messages that a consumer without a prefetch count receives ahead.
MAX_AHEAD = 64
#: Share of the mean service time that the last callback makes up.
LAST_SHARE = 0.3
#: Longest brief callback, in times of the claim-ahead time: messages may wait for that long in any case.
BRIEF_AHEADS = 2


class ClaimWindow:
    """Limits the messages claimed ahead by the time that they wait.

    The service time of tasks leaves out the work of Celery between them. So a *window* limits the messages,
    too. It grows with each message that was delivered within the claim-ahead time, and shrinks with each one
    that waited longer.

    Args:
        claim_ahead_s: Service time that may be claimed ahead, in seconds.
    """

    def __init__(self, claim_ahead_s: float) -> None:
        self._claim_ahead_s = claim_ahead_s
        self._size = 1
        self._is_full = False

    def delivered(self, waited_s: float) -> None:
        """Adapt the window to a message that was delivered this many seconds after its claim."""
        change = 1 if waited_s <= self._claim_ahead_s else -LATE_WEIGHT
        self._size = min(max(self._size + change, 0), 2 * MAX_CLAIM)

    def close(self) -> None:
        """Claim nothing ahead before the next delivery."""
        self._size = 0

    def room(self, capacity: WorkerCapacity, qos: Any, undelivered: int) -> tuple[int, int]:
        """Return how many messages to claim, and how many of them fit free pool slots.

        Args:
            capacity: Capacity of the worker.
            qos: Prefetch count of the channel.
            undelivered: Number of messages that are claimed and not delivered.
        """
        # worker_disable_prefetch replaces the method on the instance. Then only free slots are filled.
        is_gated = "can_consume" in vars(qos)
        if is_gated and not qos.can_consume():
            return 0, 0
        slots, allowed = capacity.free_slots(), qos.can_consume_max_estimate()
        room = MAX_CLAIM if slots is None else slots
        free = max((room if allowed is None else min(room, allowed)) - undelivered, 0)
        limit = 0 if is_gated else min(capacity.claim_ahead(), self._size)
        # Celery holds the reserved messages beyond its slots: then the number of free slots is negative.
        ahead = limit - max(undelivered - (slots or 0), 0)
        # Half the limit at a time, unless a slot is free: the broker prepares one half while the worker runs
        # the other, and each call brings enough messages to pay for itself.
        half = (limit + 1) // 2
        if free <= 0 and ahead < max(half, 1):
            return 0, 0
        want = min(free + max(ahead, 0), max(half, free), MAX_CLAIM)
        return want, min(free, want)

    def may_deliver(self, capacity: WorkerCapacity | None, qos: Any) -> bool:
        """Return whether the prefetch count allows a delivery.

        A full worker gets its next messages when half of the count or a slot is free. One at a time, each
        would cost a turn of the event loop and a script call.

        Args:
            capacity: Capacity of the worker; None in plain kombu.
            qos: Prefetch count of the channel.
        """
        if not qos.can_consume():
            self._is_full = True
        elif self._is_full:
            allowed, half = qos.can_consume_max_estimate(), (qos.prefetch_count + 1) // 2
            has_half = capacity is None or allowed is None or allowed >= half
            self._is_full = not (has_half or (capacity is not None and (capacity.free_slots() or 0) > 0))
        return not self._is_full


class ClaimsUnderWay:
    """The claims of one channel without an answer, at most one for each queue."""

    def __init__(self) -> None:
        #: The most messages that each claim may bring, by :attr:`Queue.key`.
        self._wanted: dict[str, int] = {}
        self._mean_brought: float = BATCH

    @property
    def may_bring(self) -> int:
        """The most messages that all claims may bring."""
        return sum(self._wanted.values())

    def share(self, want: int, ready: int) -> int:
        """Return how many messages the next claim asks for; 0 for no claim.

        Args:
            want: Number of messages that fit the capacity, beside those that the claims under way may bring.
            ready: Number of queues from which a claim may be sent.
        """
        most = min(math.ceil(BATCH / max(self._mean_brought, 1.0)), MAX_CLAIMS)
        claims = min(most - len(self._wanted), ready)
        return 0 if claims <= 0 else max(min(want, max(-(-want // claims), MIN_SHARE)), 0)

    def add(self, key: str, want: int) -> None:
        """Add a claim from the queue with this key for *want* messages."""
        self._wanted[key] = want

    def answered(self, key: str, message_count: int | None) -> None:
        """Remove a claim that brought *message_count* messages; None if it failed."""
        del self._wanted[key]
        if message_count is not None:
            self._mean_brought = 0.8 * self._mean_brought + 0.2 * message_count


class DiscardPace:
    """Decides how many discards one claim takes, and how long none follows, so that they delay no message.

    A discard needs no pool slot, but the fetching thread records it, and delivers no message for that time.
    The claim script applies the rest to the whole queue, whose consumers share it. So neither Redis nor a
    worker is busy with discards all the time.

    Args:
        clock: measures by its monotonic time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: float | None = None

    def room(self) -> int:
        """Return how many discards the next claim may take."""
        if self._seconds is None:
            return FIRST_DISCARDS
        return max(1, min(int(SLICE_S / max(self._seconds, 1e-6)), MOST_DISCARDS))

    def rest_s(self) -> float:
        """Return how long this process takes no other discards after a claim that brought some."""
        took = 0.0 if self._seconds is None else self.room() * self._seconds
        return min(max(REST_SHARE * took, MIN_REST_S), MAX_REST_S)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record one discard inside the ``with``."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            seen = self._clock.monotonic() - began
            self._seconds = seen if self._seconds is None else 0.8 * self._seconds + 0.2 * seen


class CallbackPace:
    """The time that a consumer takes for one message, where callbacks run in the delivering thread.

    Args:
        clock: measures by its monotonic time.
        claim_ahead_s: Service time that may be claimed ahead, in seconds.
    """

    def __init__(self, clock: Clock, claim_ahead_s: float) -> None:
        self._clock = clock
        self._claim_ahead_s = claim_ahead_s
        #: Monotonic time of the last delivery.
        self.delivered_at = clock.monotonic()
        self._is_timing = False
        #: Mean service time in seconds; None before the first callback has ended.
        self.mean_s: float | None = None

    def begin(self, is_timed: bool) -> None:
        """Note a delivery.

        Args:
            is_timed: Whether the callback runs in the delivering thread, so that its time is measured.
        """
        self.delivered_at = self._clock.monotonic()
        self._is_timing = is_timed

    def end(self) -> None:
        """Take the time since the last delivery for the service time of its message, once."""
        if not self._is_timing:
            return
        self._is_timing = False
        seen_s = self._clock.monotonic() - self.delivered_at
        if self.mean_s is None:
            self.mean_s = seen_s
        else:
            self.mean_s += LAST_SHARE * (seen_s - self.mean_s)

    def messages_ahead(self) -> int:
        """Return how many messages fit the claim-ahead time, for a consumer without a prefetch count."""
        ahead = 1 if self.mean_s is None else int(self._claim_ahead_s / max(self.mean_s, 1e-6))
        return min(max(ahead, 1), MAX_AHEAD)
