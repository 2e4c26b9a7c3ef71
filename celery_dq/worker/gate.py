"""What the transport asks of the worker that it feeds."""

from __future__ import annotations

from typing import Any

from celery.concurrency.solo import TaskPool as SoloPool
from celery.worker import state

from celery_dq.transport.redis.message import Message
from celery_dq.worker.burial import fail
from celery_dq.worker.followers import Followers
from celery_dq.worker.lifecycle import Lifecycle
from celery_dq.worker.stopping import stops

#: Long ago: a worker whose clock is behind must not run what the broker knows to be expired.
_LONG_AGO = "1970-01-01T00:00:00+00:00"
#: Messages of a led queue that a worker with one slot is given at a time, and such a one with a green pool.
MOST_IN_TURN, GREEN_IN_TURN = 64, 8


class Gate:
    """The worker's side of :class:`celery_dq.hooks.WorkerGate`.

    Arguments:
        consumer: Celery's consumer; its pool and task handlers are used.
        lifecycle: knows what is in the pool and how long tasks take.
        claim_ahead_s: service time that may be claimed ahead, in seconds.
    """

    def __init__(self, consumer: Any, lifecycle: Lifecycle, claim_ahead_s: float) -> None:
        self._consumer = consumer
        self._lifecycle = lifecycle
        self._claim_ahead_s = claim_ahead_s
        self._followers = Followers(consumer)
        self.blocking = isinstance(consumer.pool, SoloPool)
        #: The worker shuts down and its pool is empty or killed: nothing runs any more.
        self.over = False

    @property
    def in_turn(self) -> int:
        """Return how many messages of a led queue may be here: several where the pool has one slot."""
        if self._slots() != 1:
            return 1
        # A green pool that is full makes whoever hands it one task more wait, and that is the loop.
        return GREEN_IN_TURN if self._consumer.pool.is_green else MOST_IN_TURN

    @property
    def has_next(self) -> bool:
        """Return whether something that waited for the end of another message may begin."""
        turns = self._lifecycle.turns
        return turns is not None and turns.has_next

    def awaits(self, tag: str) -> bool:
        """Return whether something waits for the end of the message with this delivery tag."""
        turns = self._lifecycle.turns
        return turns is not None and turns.awaits(tag)

    def start_next(self) -> None:
        """Let what may begin do so."""
        if self._lifecycle.turns is not None:
            self._lifecycle.turns.start_next()

    @property
    def closing(self) -> bool:
        """Celery was told to stop: what is claimed and not begun goes back."""
        return stops()

    def room(self) -> int | None:
        """Return how many pool slots are free."""
        if self.closing:
            return 0
        slots = self._slots()
        return None if slots is None else slots - len(state.reserved_requests)

    def ahead(self) -> int:
        """Return how many messages more fit the claim-ahead time at the pace seen so far."""
        service_s = self._lifecycle.service_s
        slots = self._slots()
        if service_s is None or not slots or self.closing or self._consumer.pool.is_green:
            # A green pool that is full makes whoever hands it one task more wait, and that is the loop.
            return 0
        waiting = max(len(state.reserved_requests) - slots, 0)
        return max(int(slots * self._claim_ahead_s / max(service_s, 1e-6)) - waiting, 0)

    def _slots(self) -> int | None:
        """Return how many tasks the pool runs at a time; None when it does not say."""
        pool = self._consumer.pool
        # Celery 5.5 calls num_processes of gevent how many run now. Growing changes the size.
        size = getattr(getattr(pool, "_pool", None), "size", None) if pool.is_green else None
        slots: int | None = size if isinstance(size, int) else getattr(pool, "num_processes", None)
        return slots

    def running_tags(self) -> frozenset[str]:
        """Return the delivery tags of what the pool runs or will run."""
        return frozenset() if self.over else self._lifecycle.in_pool

    def started_tags(self) -> frozenset[str]:
        """Return the delivery tags of what runs, or will run whatever happens."""
        return frozenset() if self.over else self._lifecycle.started

    def deliver_discard(self, message: Message, reason: str) -> bool:
        """Let Celery do its bookkeeping for a task that must not run.

        Result state, chords, errbacks and events are Celery's, so the message takes
        the way of a revoked or expired one; a dead letter fails its task.
        """
        task_id, name = message.headers.get("id"), message.headers.get("task")
        if not (isinstance(task_id, str) and isinstance(name, str) and name in self._consumer.app.tasks):
            return False
        if reason.startswith("covered:") and self._followers.settle(message, reason.partition(":")[2]):
            return True
        if reason.startswith("dead:"):
            fail(self._consumer, message, name, reason.partition(":")[2])
        elif reason == "expired":
            message.headers["expires"] = _LONG_AGO
            self._receive(message)
        else:
            # Celery refuses what is in this set; only this delivery is meant, not a later replay.
            known = task_id in state.revoked
            state.revoked.add(task_id)
            try:
                self._receive(message)
            finally:
                if not known:
                    state.revoked.discard(task_id)
        return True

    def _receive(self, message: Message) -> None:
        self._consumer.task_consumer.on_message(message)
