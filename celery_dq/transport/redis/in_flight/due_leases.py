"""Which leases a round of the heartbeat renews: those that no claim has renewed lately."""

from __future__ import annotations

from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.redis.store.queue import Queue

#: Rounds of the heartbeat after a claim, for which the lease that it has renewed needs no heartbeat.
RENEWED_LATELY = 0.5


class DueLeases:
    """The leases of one process that need a heartbeat.

    A claim renews the lease of its partition, too. A round leaves out a lease whose renewal was sent less
    than :data:`RENEWED_LATELY` rounds ago. At the next round that renewal is one and a half rounds old. A
    lease is trusted for 2.4 rounds, and holds for four. The age counts from the sending, which is never later
    than the renewal in Redis.

    Only a heartbeat reaps, and learns of lost data. No lease of any consumer that the last heartbeat has seen
    ends before the next round; a newer lease of the same length ends later. This process has such a lease, so
    a heartbeat is left out twice in a row at most. The heartbeat of a leader is never left out.

    Args:
        in_flight: knows when each lease was renewed.
        round_s: seconds between two rounds.
    """

    def __init__(self, in_flight: InFlightMessages, round_s: float) -> None:
        self._in_flight = in_flight
        self._round_s = round_s
        #: Partition -> the monotonic time before which no lease of it ends, as its last heartbeat has seen.
        self._first_ends: dict[str, float] = {}

    def is_due(self, queue: Queue, now: float) -> bool:
        """Return whether the lease on *queue* needs a heartbeat in a round that begins at monotonic *now*."""
        renewed_at = self._in_flight.renewed_at(queue.key)
        return (
            bool(queue.token)
            or renewed_at is None
            or now - renewed_at >= RENEWED_LATELY * self._round_s
            or self._first_ends.get(queue.key, now) <= now + self._round_s
        )

    def answered(self, partition: str, sent_at: float, next_end_s: float) -> None:
        """Record the answer to a heartbeat.

        Args:
            partition: :attr:`Queue.key` of the queue.
            sent_at: monotonic time at which the heartbeat was sent.
            next_end_s: seconds from then until the first lease of any consumer ends.
        """
        self._first_ends[partition] = sent_at + next_end_s

    def forget(self, partition: str) -> None:
        """Remove a partition on which this process has no lease any more."""
        self._first_ends.pop(partition, None)
