"""The acks of one consumer thread: when they are due, and what came of those that were sent.

A claim takes the acks of its queue along. The others wait for a claim as long as nothing waits for them.
Acks that Redis refuses are sent again a second later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from celery_dq.transport.in_flight.pending_acks import Acks, PendingAcks, ack_calls
from celery_dq.transport.redis.consuming.leases import Leases
from celery_dq.transport.redis.consuming.trip import Trip
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.script_calls import is_lost

#: Seconds that a finish waits for the next claim, which can carry it: with 100 messages a second, most do.
FINISH_WAIT_S = 0.01


class AckSender:
    """Adds acks to the trips of a consumer thread, which calls all methods but :attr:`queues`.

    Args:
        identity: The process, with its pending acks.
        leases: The leases of the thread. It sends the acks of these queues.
        comes_with_claim: Returns whether the pending finishes of a queue may wait for its next claim.
        refused: Handles an error in the place of an answer; returns the seconds until the next attempt.
    """

    def __init__(
        self,
        identity: ConsumerIdentity,
        leases: Leases,
        comes_with_claim: Callable[[Queue, PendingAcks], bool],
        refused: Callable[[str, Queue, Exception], float],
    ) -> None:
        self._identity = identity
        self._leases = leases
        self._comes_with_claim = comes_with_claim
        self._refused = refused
        #: Monotonic time until which nothing is sent, after a refusal.
        self.resumes_at = 0.0
        #: The queues whose acks wait no longer.
        self._urgent: set[str] = set()

    @property
    def queues(self) -> list[tuple[Queue, PendingAcks]]:
        """The queues with pending acks."""
        return self._identity.in_flight.queues_with_acks(self._leases.queues)

    def send_soon(self, keys: Iterable[str]) -> None:
        """Let the acks of these queues wait no longer."""
        self._urgent.update(keys)

    def next_time(self) -> float:
        """Return the monotonic time at which acks are due; infinity without any."""
        next_at = math.inf
        for queue, box in self._identity.in_flight.queues_with_acks(self._leases.queues):
            next_at = min(next_at, max(self._due_at(queue, box), self.resumes_at))
        return next_at

    def plan(self, trip: Trip) -> None:
        """Add the acks that are due, of the queues from which the trip does not claim."""
        identity = self._identity
        if trip.now < self.resumes_at or not identity.in_flight.with_acks:
            return
        for queue, box in identity.in_flight.queues_with_acks(self._leases.queues):
            if queue.key in trip.claims or self._due_at(queue, box) > trip.now:
                continue
            if trip.room <= 0:  # the calls of one queue may be more than the room
                return
            calls = ack_calls(box, identity.consumer, queue)
            while queue.token and len(calls) > 1:  # each waits for the answer to the one before
                identity.in_flight.restore_acks(queue.key, calls.pop()[1])
            for call, acks in calls:
                answered = partial(self._acked, queue, acks)
                trip.add(call, queue, answered, partial(self._not_acked, queue, acks))  # type: ignore[arg-type]
        self._urgent.clear()

    def _due_at(self, queue: Queue, box: PendingAcks) -> float:
        """Return the monotonic time at which the acks of a queue are sent, if no claim takes them before."""
        if box.releases or box.dead_letters or queue.key in self._urgent:
            return -math.inf
        due_at = math.inf
        for held in tuple(box.settles):
            # In place of the settle of a task that has ended in its process, its finish is sent by then.
            if held.runs_outside or not held.done:
                due_at = held.settle_by
                break
        if not box.finishes:
            return due_at
        if not self._comes_with_claim(queue, box):
            return -math.inf
        return min(due_at, box.oldest_finish_at + FINISH_WAIT_S)

    def _acked(self, queue: Queue, acks: Acks, answer: Any) -> None:
        acks.confirm()
        if not acks.dead_letters:
            self._identity.in_flight.stale += answer
        if acks.releases:
            self._identity.in_flight.confirm_releases(queue.key, len(acks.releases))

    def _not_acked(self, queue: Queue, acks: Acks, exc: Exception) -> None:
        self._identity.in_flight.restore_acks(queue.key, acks)
        if not is_lost(exc):
            pause_s = self._refused("ack", queue, exc)
            self.resumes_at = self._identity.clock.monotonic() + pause_s
