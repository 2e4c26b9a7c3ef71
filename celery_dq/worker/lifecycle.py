"""The states of a message of a tenant broker in a worker, by the life of its task, and the worker's capacity.

::

    claimed ─▶ reserved ─▶ in the pool ─▶ started ─▶ over
                  │             │            │         │
               released      vetoed       settled   finished, released or dead-lettered

Celery's default is to acknowledge when the task *starts*. For the broker that is not the end: the tenant's
slot is taken until the task is over. Celery does not report that end to the message.
"""

from __future__ import annotations

from typing import Any

from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import Ignore, Retry, TaskRevokedError
from celery.worker import state

from celery_dq.clock import Clock
from celery_dq.compat.task_ends import fails_for_good
from celery_dq.errors import LONGEST_REASON, described
from celery_dq.keys import PartitionKeys
from celery_dq.protocols import RESOURCE_HEADER
from celery_dq.shown import shown_logger
from celery_dq.transport.in_flight import Message, PausingRequeue
from celery_dq.transport.partition_replies import PauseCause
from celery_dq.transport.throttled import Throttled
from celery_dq.worker.discards import Discards
from celery_dq.worker.ready_requests import ReadyRequests
from celery_dq.worker.task_events import TaskSubscriber, error_of, stops

logger = shown_logger(__name__)


class TaskLifecycle(TaskSubscriber):
    """Tracks the messages in one pool, and ends them with their tasks.

    Args:
        pool: the worker's pool.
        clock: its monotonic time measures how long tasks take.
        dead_letter_failures: keep tasks that failed for good as dead letters.
    """

    role = "lease"

    def __init__(self, pool: Any, clock: Clock, dead_letter_failures: bool) -> None:
        self._clock = clock
        self._dead_letter_failures = dead_letter_failures
        self._in_pool: dict[str, float] = {}
        self._started: dict[str, None] = {}
        # A child process has begun before it calls back; a thread or greenlet calls back before it begins.
        self.asks_first = not pool.uses_semaphore
        # A solo pool begins the task, and calls back, as soon as it gets the request.
        self._asks_at_once = isinstance(pool, SoloPool)
        #: Seconds that a task takes, from its start; a moving average, None before the first task.
        self.service_s: float | None = None

    @property
    def in_pool(self) -> frozenset[str]:
        """Delivery tags of the messages that the pool runs or will run."""
        return frozenset(tuple(self._in_pool))

    @property
    def started(self) -> frozenset[str]:
        """The tags of :attr:`in_pool` whose start can no longer be prevented."""
        return frozenset(tuple(self._started)) if self.asks_first else self.in_pool

    def follows(self, request: Any) -> bool:
        """See :class:`TaskSubscriber`."""
        return isinstance(request.message, Message)

    def offered(self, request: Any) -> None:
        """Refuse a message that another worker may already have."""
        message: Message = request.message
        message.pass_eta_to(request)
        if not self._asks_at_once:
            # For a task that calls back after its start, this is the last check.
            self._veto(request, message, starts=not self.asks_first)
        self._in_pool[message.delivery_tag] = self._clock.monotonic()

    def refused(self, request: Any) -> None:
        """See :class:`TaskSubscriber`."""
        self._forget(request.message.delivery_tag)

    def failed_to_start(self, request: Any) -> None:
        """Finish a message that was settled already; another one is released with its channel."""
        message: Message = request.message
        self._forget(message.delivery_tag)
        if message.settles:
            message.finish()

    def accepted(self, request: Any) -> None:
        """Settle the message, unless its ack comes late."""
        message: Message = request.message
        tag: str = message.delivery_tag
        if self.asks_first:
            message.wait_for_confirmation()
            # The lease may have been lost while the job waited in the pool's queue.
            self._veto(request, message, starts=True)
            if message.permit is not None and request.id in state.revoked and request.revoked():
                # The pool gets more messages of a singleton queue than it has slots, so one may be revoked.
                self._forget(tag)
                raise TaskRevokedError(request.id)
        self._in_pool[tag] = self._clock.monotonic()
        self._started[tag] = None
        message.started = True
        if not request.task.acks_late:
            message.settle(may_wait=not self.asks_first)

    def ending(self, request: Any, info: Any, crashed: bool) -> None:
        """Note why the task has failed, before Celery acknowledges or rejects its message."""
        message: Message = request.message
        error = error_of(info)
        if crashed:
            message.crashed = True
            if getattr(request.task, "retry_on_worker_lost", False):  # since Celery 5.7
                message.expect_return()
        elif isinstance(error, Throttled) and PartitionKeys.parse(message.delivery_tag) is not None:
            _requeue_and_pause(request, message, error)
        elif isinstance(error, (Retry, Ignore)):
            message.expect_return()
        if self._dead_letter_failures and error is not None and fails_for_good(request, error, crashed):
            message.dead_letter(f"failed: {described(error)}"[:LONGEST_REASON])

    def ended(self, request: Any, info: Any) -> None:
        """Finish the message, or requeue it."""
        message: Message = request.message
        started_at = self._forget(message.delivery_tag)
        if started_at is not None:
            seen = self._clock.monotonic() - started_at
            self.service_s = seen if self.service_s is None else 0.8 * self.service_s + 0.2 * seen
        if message.settles:
            message.finish()
        elif not request.acknowledged:
            # Celery cancelled the task, and leaves the redelivery to the broker.
            message.release("requeue")

    def forgotten(self, request: Any) -> None:
        """Release the message."""
        self._forget(request.message.delivery_tag)
        request.message.release("unstarted")

    def _veto(self, request: Any, message: Message, *, starts: bool) -> None:
        """Refuse to start a message that another worker may already have.

        Raises:
            TaskRevokedError: the message was refused, and released.
        """
        if message.may_start() if starts else message.may_deliver():
            return
        if message.may_deliver():
            logger.info(
                "Task %s[%s] is not started: the message before it will return. It was released.",
                request.name,
                request.id,
                extra={"event": "task_waits_for_predecessor"},
            )
        else:
            logger.warning(
                "Task %s[%s] is not started: the lease on its message, or the term of its leader, was not "
                "renewed in time. It was released.",
                request.name,
                request.id,
                extra={"event": "task_not_started"},
            )
        self._forget(message.delivery_tag)
        message.release("unstarted")
        state.task_ready(request)
        raise TaskRevokedError(request.id)

    def _forget(self, tag: str) -> float | None:
        """Stop counting a message as in the pool; return the time of its start, or of its entry."""
        self._started.pop(tag, None)
        return self._in_pool.pop(tag, None)


def _requeue_and_pause(request: Any, message: Message, throttled: Throttled) -> None:
    """Requeue the message of a throttled task, and pause its tenant in the same step.

    The process of the task has paused other tenants that it has named; see ``app/throttling.py``.
    """
    own = message.headers.get(RESOURCE_HEADER) or message.record.tenant
    tenants = throttled.tenants or (own,)
    why = f" ({throttled.reason})" if throttled.reason else ""
    for_us = throttled.remaining_us
    if for_us:
        logger.info(
            "Tenant %r of queue %s is to pause for %g s, because task %s[%s] was throttled%s. The task was "
            "requeued, and runs again after the pause.",
            ", ".join(tenants),
            message.queue,
            throttled.retry_after,
            request.name,
            request.id,
            why,
            extra={"event": "task_throttled", "queue": message.queue, "tenant": ", ".join(tenants)},
        )
    else:
        logger.info(
            "Task %s[%s] was throttled%s until a time that is over. No tenant is paused. The task was "
            "requeued, and runs again at once.",
            request.name,
            request.id,
            why,
            extra={"event": "task_throttled", "queue": message.queue, "tenant": ", ".join(tenants)},
        )
    cause = PauseCause(throttled.reason, request.name, request.id).pack()
    message.release(PausingRequeue(for_us, cause, message.record.pack(), alone=own not in tenants))


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
        return stops(self._consumer)

    def free_slots(self) -> int | None:
        """Return how many pool slots are free; below zero when more requests are reserved than fit."""
        if stops(self._consumer):
            return 0
        slots = self.slots()
        return None if slots is None else slots - len(state.reserved_requests)

    def claim_ahead(self) -> int:
        """Return how many messages beyond the slots fit the claim-ahead time at the measured service time."""
        service_s = self._lifecycle.service_s
        slots = self.slots()
        if service_s is None or not slots or self._is_green or stops(self._consumer):
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
