"""How many messages a worker claims beyond its free slots, and when its prefetch count allows a delivery."""

from __future__ import annotations

from typing import Any

from celery_dq.protocols import WorkerCapacity

#: Maximum number of messages per claim, so that a script stays short.
MAX_CLAIM = 200
#: Number of messages by which one late message shrinks the window. Most messages are then in time.
LATE_WEIGHT = 4


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
