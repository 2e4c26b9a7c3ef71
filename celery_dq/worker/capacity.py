"""The capacity of the worker, for the transport that delivers to it."""

from __future__ import annotations

from typing import Any

from celery.concurrency.solo import TaskPool as SoloPool
from celery.worker import state

from celery_dq.compat.stopping import stops
from celery_dq.worker.discards import Discards
from celery_dq.worker.lifecycle import TaskLifecycle
from celery_dq.worker.ready_requests import ReadyRequests

#: Limit of the messages of a singleton queue in a worker with one slot, and with a green pool of one slot.
MOST_IN_TURN, GREEN_IN_TURN = 64, 8


class PoolCapacity:
    """The worker's side of :class:`celery_dq.protocols.WorkerCapacity`.

    Args:
        consumer: Celery's consumer; its pool and task handlers are used.
        lifecycle: tracks the messages in the pool and the service time of tasks.
        claim_ahead_s: service time that may be claimed ahead, in seconds.
    """

    def __init__(self, consumer: Any, lifecycle: TaskLifecycle, claim_ahead_s: float) -> None:
        self._consumer = consumer
        self._lifecycle = lifecycle
        self._claim_ahead_s = claim_ahead_s
        #: Requests that wait for the end of another; None where a task calls back before it starts, and in a
        #: worker without singleton queues.
        self.ready_requests: ReadyRequests | None = None
        self.deliver_discard = Discards(consumer).deliver_discard
        self.runs_tasks_in_loop = isinstance(consumer.pool, SoloPool)
        self._is_green = bool(consumer.pool.is_green)
        #: The worker shuts down and its pool is empty or killed: no task runs.
        self.over = False

    @property
    def singleton_window(self) -> int:
        """Return how many messages of a singleton queue may be here: several where the pool has one slot."""
        if self.slots() != 1:
            return 1
        # A full green pool blocks the loop, which passes the tasks to it.
        return GREEN_IN_TURN if self._is_green else MOST_IN_TURN

    @property
    def has_startable(self) -> bool:
        """Return whether a request that waited for the end of another message may begin."""
        ready = self.ready_requests
        return ready is not None and ready.has_startable

    def awaits_end_of(self, tag: str) -> bool:
        """Return whether a request waits for the end of the message with this delivery tag."""
        ready = self.ready_requests
        return ready is not None and ready.awaits_end_of(tag)

    def start_ready(self) -> None:
        """Start the requests that may begin."""
        if self.ready_requests is not None:
            self.ready_requests.start_ready()

    @property
    def closing(self) -> bool:
        """Return whether the worker stops: claimed messages that have not begun are released."""
        return stops()

    def free_slots(self) -> int | None:
        """Return how many pool slots are free; below zero when more requests are reserved than fit."""
        if stops():
            return 0
        slots = self.slots()
        return None if slots is None else slots - len(state.reserved_requests)

    def claim_ahead(self) -> int:
        """Return how many messages beyond the slots fit the claim-ahead time at the measured service time."""
        service_s = self._lifecycle.service_s
        slots = self.slots()
        if service_s is None or not slots or self._is_green or stops():
            # A full green pool blocks the loop, which passes the tasks to it.
            return 0
        return int(slots * self._claim_ahead_s / max(service_s, 1e-6))

    def slots(self) -> int | None:
        """Return how many tasks the pool may run at a time; None when the pool has no such number."""
        pool = self._consumer.pool
        slots: int | None = getattr(pool, "num_processes", None)
        if self._is_green:
            # Celery 5.5: gevent's num_processes is the number of running tasks. The size follows pool_grow.
            size = getattr(getattr(pool, "_pool", None), "size", None)
            slots = size if isinstance(size, int) else slots
        scaler = getattr(self._consumer.controller, "autoscaler", None)
        if slots is None or scaler is None:
            return slots
        # The autoscaler adds a process when a task is reserved and there is no free one.
        return max(slots, int(scaler.max_concurrency))

    def running_tags(self) -> frozenset[str]:
        """Return the delivery tags of the messages that the pool runs or will run."""
        return frozenset() if self.over else self._lifecycle.in_pool

    def started_tags(self) -> frozenset[str]:
        """Return the delivery tags of the messages that run, or whose start can no longer be prevented."""
        return frozenset() if self.over else self._lifecycle.started
