"""Dedup on brokers that give no verdicts: a worker requests a task's dedup lock before the task runs.

::

    received ──▶ requested ──ACCEPT──▶ in the pool ──▶ over
                  │  └───────BLOCK───▶ waits ───────▶ in the pool
                  └──────────DECLINE─▶ waits for the result of the covering run, or is dropped

A waiting task holds no slot of the pool. It is not acknowledged, so the broker delivers it again if this
worker dies. The prefetch window grows by one while a task waits, or has no verdict yet.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery import states
from celery.exceptions import Retry
from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker import state

from celery_dq.clock import Clock, SystemClock
from celery_dq.context import AppContext
from celery_dq.dedup.local import LocalCoordinator
from celery_dq.dedup.machine import (
    Coordinator,
    CoordinatorLockSnapshot,
    DedupResult,
    HeldDedupLock,
    Verdict,
)
from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.signals import dedup_lock_lost
from celery_dq.errors import ConfigurationError, InvalidKey
from celery_dq.other_brokers.dedup_calls import (
    DeclinedCalls,
    OutsidePrefetch,
    QueuedCalls,
    UnansweredCall,
    UnansweredCalls,
    WorkerDedupRequest,
    WorkerDedupRequests,
    announce,
    wants_result,
)
from celery_dq.other_brokers.redis_coordinator import (
    REQUEST_ERRORS,
    SILENCE,
    DedupLockHeartbeat,
    OwnRedis,
    redis_of,
)
from celery_dq.other_brokers.singleton_sequencer import SingletonMessage
from celery_dq.shown import shown_logger
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.waker import Waker
from celery_dq.worker.bootsteps import ContextStep
from celery_dq.worker.discards import Followers
from celery_dq.worker.task_events import TaskSubscriber, error_of, task_events

logger = shown_logger(__name__)

#: Seconds after its due time within which a retry must arrive; then the next call gets the dedup lock.
RETRY_GRACE = 30.0


class _WaitingRequest(NamedTuple):
    """A waiting call. The call `ahead` had begun to run before this one requested the lock."""

    asked: UnansweredCall
    ahead: str


class WorkerDedupLocks(TaskSubscriber):
    """Requests dedup locks between Celery's consumer and its pool.

    Args:
        consumer: Celery's consumer.
        coordinator: gives the verdicts.
        request_of: returns the dedup request of a task, None when the task takes no part.
        clock: monotonic time, for retries that do not arrive.
        lease_s: seconds that a lease holds.
        check_soon: called from any thread, to schedule :meth:`look` in the thread that may pass tasks to the
            pool.
    """

    role = "dedup_locks"

    def __init__(
        self,
        consumer: Any,
        coordinator: Coordinator,
        request_of: Callable[[Any], WorkerDedupRequest | None],
        clock: Clock,
        lease_s: float,
        check_soon: Callable[[], None],
    ) -> None:
        self._consumer = consumer
        self._coordinator = coordinator
        self._request_of = request_of
        self._clock = clock
        self._check_soon = check_soon
        self._events = task_events(consumer)
        self._run = self._events.add_gate(self.role, self.request_lock)
        self._events.subscribe(self)
        self._followers = Followers(consumer)
        self._queued = QueuedCalls()
        self._outside = OutsidePrefetch(consumer)
        self._unasked = UnansweredCalls(consumer.hostname, self._outside, clock, self._look_after)
        self._declined = DeclinedCalls(
            coordinator,
            self._followers,
            self._run,
            self._outside,
            self._unasked.not_answered,
            clock,
            self._look_after,
        )
        #: Runs that ended during an outage: the lock, the error of the run, whether a release got no answer.
        self._ended: list[tuple[HeldDedupLock, BaseException | None, bool]] = []
        subscriber = coordinator.new_client if isinstance(coordinator, OwnRedis) else None
        self.heartbeat = DedupLockHeartbeat(
            coordinator,
            lease_s,
            check_soon,
            self.on_lock_lost,
            subscriber,
            self._unasked.silent,
            self._unasked.answered,
        )
        # Without an event loop, a waiting task may start in one thread while another thread makes a request.
        self._lock = threading.RLock()
        self._waiting: dict[HeldDedupLock, _WaitingRequest] = {}
        self._looks_again = False
        self._retried: dict[HeldDedupLock, float] = {}
        self._taken_from: set[HeldDedupLock] = set()
        self._running: dict[Any, HeldDedupLock] = {}

    # -- before the pool -------------------------------------------------------

    def request_lock(self, request: Any) -> Any:
        """Request the dedup lock of a task. The task then runs, waits, or is dropped."""
        try:
            wanted = self._request_of(request)
        except InvalidKey as exc:
            return self._refuse(request, exc)
        if wanted is None:
            return self._run(request)
        singleton: SingletonMessage | None = getattr(request.message, "dq_singleton_message", None)
        with self._lock:
            if singleton is not None and singleton.run is None:
                covering = self._queued.covering(request, wanted, singleton.behind)
                if isinstance(covering, str):
                    return self._cover(request, wanted, covering)
                singleton.run = covering
            return self._ask(request, wanted)

    def _cover(self, request: Any, wanted: WorkerDedupRequest, covering: str) -> None:
        """Decline a call of a singleton queue that another call of the queue covers."""
        announce(request, wanted, DedupResult(Verdict.DECLINE, covering, 0))
        with contextlib.suppress(*REQUEST_ERRORS):  # a count
            self._coordinator.count_decline(wanted.key)
        self._declined.remember(request, covering)
        self._decline(request, wanted.key, covering)

    def _ask(self, request: Any, wanted: WorkerDedupRequest) -> Any:
        unasked = UnansweredCall(request, wanted, f"{request.id}/{uuid.uuid4().hex}")
        if self._unasked.outage:
            return self._wait(unasked)
        try:
            answer = self._request_verdict(unasked)
        except Exception as error:
            # A call without a verdict must not run.
            self._unasked.not_answered(error, request)
            return self._wait(unasked)
        return self._obey(unasked, *answer)

    def _wait(self, unasked: UnansweredCall) -> None:
        self._unasked.add(unasked)
        self.heartbeat.start()

    def _request_verdict(self, unasked: UnansweredCall) -> tuple[DedupResult, str]:
        """Return the verdict, and which call is ahead of one that waits."""
        request, key = unasked.request, unasked.wanted.key
        result = self._enqueue(unasked)
        if result.left and not self._declined.has_result(request, result.covering):
            # An earlier delivery was declined, and its covering call has ended without a result.
            self._coordinator.forget_covered(request.id)
            result = self._enqueue(unasked)
        waits = result.verdict is not Verdict.DECLINE and not result.token
        return result, self._ahead(key, result) if waits else ""

    def _enqueue(self, unasked: UnansweredCall) -> DedupResult:
        request, wanted, call = unasked
        return self._coordinator.enqueue(
            wanted.key,
            call,
            task=request.id,
            policy=wanted.policy,
            waiting=wanted.waiting,
            timeout=wanted.timeout,
            follow=wants_result(request),
        )

    def _obey(self, unasked: UnansweredCall, result: DedupResult, ahead: str) -> Any:
        request, wanted, call = unasked
        announce(request, wanted, result)
        holding = HeldDedupLock(wanted.key, call, result.token)
        if result.verdict is Verdict.DECLINE:
            return self._decline(request, wanted.key, result.covering)
        if result.token:
            return self._start(request, holding)
        self._outside.add(request)
        self._waiting[holding] = _WaitingRequest(unasked, ahead)
        self.heartbeat.hold(holding)
        return None

    def _ahead(self, key: str, result: DedupResult) -> str:
        if result.verdict is Verdict.BLOCK:
            return result.covering
        now = self._coordinator.inspect(key)  # the answer to an heir names only the heir itself
        return now.head.call if now is not None and now.head is not None else ""

    def _refuse(self, request: Any, exc: InvalidKey) -> None:
        """Fail a task without a valid key, as its call would have failed in a process that has the task."""
        logger.error(
            "Task %s[%s] fails: %s", request.name, request.id, exc, extra={"event": "dedup_key_invalid"}
        )
        state.task_ready(request)
        self._followers.give(request, {"status": states.FAILURE, "result": exc}, request.id)
        request.acknowledge()

    def _decline(self, request: Any, key: str, covering: str) -> None:
        self._declined.decline(request, key, covering)
        singleton: SingletonMessage | None = getattr(request.message, "dq_singleton_message", None)
        if singleton is not None:
            # The next message begins, while this one waits for a result.
            singleton.end()
        if self._declined:
            # Its thread receives the ends of runs in other workers, and checks at each renewal as well.
            self.heartbeat.start()
            # The covering run may have ended just now.
            self._check_soon()

    def _look_after(self, seconds: float) -> None:
        if not self._looks_again:
            self._looks_again = True
            self._consumer.timer.call_after(seconds, self._look_again)

    def _look_again(self) -> None:
        self._looks_again = False
        self.look()

    # -- running ---------------------------------------------------------------

    def _start(self, request: Any, holding: HeldDedupLock) -> Any:
        self.heartbeat.hold(holding)
        self._running[request] = holding
        request.request_dict["dq_token"] = holding.token
        return self._run(request)

    def follows(self, request: Any) -> bool:
        """See :class:`TaskSubscriber`."""
        return request in self._running

    def refused(self, request: Any) -> None:
        """Release the lock of a task that does not get to the pool."""
        self._over(self._running.pop(request), None)

    def ended(self, request: Any, info: Any) -> None:
        """Release the lock."""
        singleton: SingletonMessage | None = getattr(request.message, "dq_singleton_message", None)
        if singleton is not None and singleton.run is not None:
            singleton.run.is_over = True
        self._over(self._running.pop(request), error_of(info))

    def forgotten(self, request: Any) -> None:
        """Release the lock of a job that the pool has dropped; the broker delivers the message again."""
        holding = self._running.pop(request)
        self._release_message(holding, self._coordinator.finish, *holding)

    def failed_to_start(self, request: Any) -> None:
        """Release the lock of a job that the pool did not take."""
        self.forgotten(request)

    def _over(self, holding: HeldDedupLock, exc: BaseException | None) -> None:
        self.heartbeat.drop(holding)
        try:
            if self._unasked.outage:
                self._ended.append((holding, exc, False))
            else:
                self._leave(holding, exc)
        except SILENCE as error:
            self._unasked.silent(error)
            self._ended.append((holding, exc, True))
        self._check_soon()

    def _leave(self, holding: HeldDedupLock, exc: BaseException | None, again: bool = False) -> None:
        """Release the dedup lock of a run that has ended. Raises when the server does not answer.

        Args:
            holding: the lock.
            exc: the error of the run.
            again: an earlier attempt got no answer, and may have released the lock.
        """
        try:
            self._finish_or_keep(holding, exc, again)
        except SILENCE:
            raise
        except Exception:
            logger.exception(
                "The dedup lock of %s was not released; it ends with its lease.",
                holding,
                extra={"event": "dedup_lock_release_failed"},
            )

    def _finish_or_keep(self, holding: HeldDedupLock, exc: BaseException | None, again: bool) -> None:
        key, call, token = holding
        if isinstance(exc, Retry):
            # Keep the place at the head for the retry, so that no other call runs before it.
            if self._coordinator.release(key, call, token) or again:
                waits = HeldDedupLock(key, call, 0)
                self._retried[waits] = self._clock.monotonic() + _seconds_until(exc) + RETRY_GRACE
                self.heartbeat.hold(waits)
                now = self._coordinator.inspect(key)
                if now is not None and now.heir is not None:
                    # The retry has arrived already, as the heir of the run.
                    self._forget_retried(waits)
        elif not self._coordinator.finish(key, call, token) and not again:
            self._on_taken(holding)
            self._taken_from.discard(holding)

    # -- starting waiting calls ------------------------------------------------

    def look(self) -> None:
        """Start the waiting calls that may start, and end the declined calls that have a result."""
        with self._lock:
            if not self._unasked.may_ask:
                return
            try:
                self._look()
            except SILENCE as error:
                self._unasked.silent(error)

    def _look(self) -> None:
        while self._ended:
            holding, exc, again = self._ended[0]
            self._ended[0] = (holding, exc, True)
            self._leave(holding, exc, again)
            self._ended.pop(0)
        self._look_at_waiting()
        self._unasked.ask(self._request_verdict, self._obey)
        self._declined.settle()
        self._forget_late_retries()

    def _look_at_waiting(self) -> None:
        for holding, (asked, ahead) in list(self._waiting.items()):
            request = asked.request
            revoked = request.id in state.revoked
            try:
                token, now = self._turn_of(holding, revoked)
            except SILENCE:
                raise
            except Exception as error:
                # The error concerns this key only: request its lock again, and go on with the others.
                if self._waiting.pop(holding, None) is not None:
                    self.heartbeat.drop(holding)
                    self._unasked.not_answered(error, request)
                    self._unasked.add(asked)
                continue
            if token == 0 or self._waiting.pop(holding, None) is None:
                continue
            self.heartbeat.drop(holding)
            self._outside.remove(request)
            if revoked:
                # On the way to the pool Celery does its bookkeeping of a revoked task.
                self._run(request)
            elif token is None:
                self._on_displaced(request, holding.key, ahead, now)
            else:
                self._start(request, HeldDedupLock(holding.key, holding.call, token))

    def _turn_of(
        self, holding: HeldDedupLock, revoked: bool
    ) -> tuple[int | None, CoordinatorLockSnapshot | None]:
        """Return the token of a waiting call, as ``start`` does; for a call without a place also its key."""
        if revoked:
            self._coordinator.withdraw(holding.key, holding.call)
            return None, None
        token = self._coordinator.start(holding.key, holding.call)
        return token, self._coordinator.inspect(holding.key) if token is None else None

    def _forget_late_retries(self) -> None:
        moment = self._clock.monotonic()
        for holding, until in list(self._retried.items()):
            if until < moment and self._retried.pop(holding, None) is not None:
                self._release_message(holding, self._coordinator.withdraw, holding.key, holding.call)

    def _forget_retried(self, holding: HeldDedupLock) -> None:
        if self._retried.pop(holding, None) is not None:
            self.heartbeat.drop(holding)
            self._coordinator.withdraw(holding.key, holding.call)

    def forget_waiting(self) -> None:
        """Forget the calls that the pool does not have: the broker delivers their messages again."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._unasked.clear()
            self._declined.clear()
            self._outside.clear()
        for holding in waiting:
            self._release_message(holding, self._coordinator.withdraw, holding.key, holding.call)
        if self._consumer.pool.uses_semaphore:
            # Celery has dropped the requests that waited for a slot of the pool.
            for request in self._running.keys() - self._events.requests:
                self.forgotten(request)

    def _release_message(self, holding: HeldDedupLock, leave: Callable[..., bool], *args: Any) -> None:
        self.heartbeat.drop(holding)
        if self._unasked.outage:
            return  # the lock ends with its lease
        try:
            leave(*args)
        except SILENCE as error:
            self._unasked.silent(error)
        except Exception:
            logger.warning(
                "The dedup lock of %s was not released; it ends with its lease.",
                holding,
                exc_info=True,
                extra={"event": "dedup_lock_release_failed"},
            )

    def on_lock_lost(self, holding: HeldDedupLock) -> None:
        """Note a lost dedup lock: replaced, evicted, not renewed in time, or taken over by a retry."""
        self._retried.pop(holding, None)
        if holding.token:
            self._on_taken(holding)

    def _on_taken(self, holding: HeldDedupLock) -> None:
        """Report once that a run has lost its dedup lock; both a renewal and the end of the run notice it."""
        if holding in self._taken_from:
            self._taken_from.discard(holding)
            return
        self._taken_from.add(holding)
        key, call, token = holding
        logger.warning(
            "Task %s lost its dedup lock %s; another run may have begun.",
            call,
            key,
            extra={"event": "dedup_lock_lost"},
        )
        dedup_lock_lost.send(sender=self._coordinator, key=key, task_id=call.partition("/")[0], token=token)

    def _on_displaced(self, request: Any, key: str, ahead: str, now: CoordinatorLockSnapshot | None) -> None:
        """End the wait of a call that lost its place: to a later call, which covers it, or with its lease."""
        later = None if now is None else now.tail or now.heir or now.head
        if later is None or later.call == ahead:
            # A run that began before this call does not cover it.
            self.request_lock(request)
        else:
            self._declined.remember(request, later.call)
            self._decline(request, key, later.call)


def _seconds_until(exc: Retry) -> float:
    """Seconds until a retry is due. Its ETA may be a text; without a time zone it is UTC, as for Celery."""
    when: Any = exc.when
    if isinstance(when, str):
        when = maybe_iso8601(when)
    if isinstance(when, datetime):
        return max((maybe_make_aware(when) - datetime.now(timezone.utc)).total_seconds(), 0.0)
    return float(when or 0.0)


class DedupLocksStep(ContextStep):
    """Requests the dedup lock of every task that takes part in dedup.

    Does nothing on a tenant broker. It connects at the first call with a key, because calls may have keys
    even if no task has a dedup rule.

    Raises:
        ConfigurationError: A task takes part, but there is no Redis for the dedup locks: set
        ``dq_dedup_url``.
    """

    # This step stops before the step of singleton queues, so that a message has released its dedup lock
    # before it is released.
    requires = (
        "celery_dq.worker.task_events:TaskEventsStep",
        "celery_dq.other_brokers.singleton_sequencer:SequencedSingletonStep",
    )

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Make the requests, on a broker that gives no verdicts."""
        app = consumer.app
        if consumer.conninfo.transport_cls in TENANT_SCHEMES:
            return False
        try:
            coordinator = _coordinator(app, context, consumer.hostname)
        except ConfigurationError:
            if any(rule_of(task) is not None for task in app.tasks.values()):
                raise
            return False  # most apps use neither dedup nor Redis
        request_of, lease_s = WorkerDedupRequests(app).of, context.options.lease_us / 1e6
        self._locks = WorkerDedupLocks(consumer, coordinator, request_of, SystemClock(), lease_s, self._wake)
        self._waker = Waker(self._locks.look)
        self._wake_pending = False
        self._consumer: Any = None
        return True

    def start(self, consumer: Any) -> None:
        """Register with the event loop, which may be a new one."""
        if consumer.hub is not None:
            self._waker.attach(consumer.hub)
        self._consumer = consumer

    def stop(self, consumer: Any) -> None:
        """Forget the waiting calls, before a reconnect and at the end."""
        self._locks.forget_waiting()

    def shutdown(self, consumer: Any) -> None:
        """Stop the heartbeat. Leases expire, and the broker requeues waiting messages with the connection."""
        self._locks.heartbeat.stop()
        self._waker.close()

    def _wake(self) -> None:
        """Schedule a check of the waiting calls in the consumer's thread. May be called from any thread."""
        if self._consumer is not None and self._consumer.hub is not None:
            self._waker.wake()
        elif self._consumer is not None and not self._wake_pending:
            # Without an event loop (green pools) the consumer may block in a read for seconds. The timer,
            # which starts tasks with an ETA, does not block.
            self._wake_pending = True
            self._consumer.timer.call_after(0, self._timed)

    def _timed(self) -> None:
        self._wake_pending = False
        self._locks.look()


def _coordinator(app: Any, context: AppContext, hostname: str) -> Coordinator:
    try:
        url = redis_of(app, context.options)
    except ConfigurationError:
        if not str(app.conf.broker_read_url or app.conf.broker_url or "").startswith("memory://"):
            raise
        # memory:// has all its workers in one process.
        context.coordinator = local = LocalCoordinator()
        return local
    return OwnRedis(url, context.options, f"{hostname}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
