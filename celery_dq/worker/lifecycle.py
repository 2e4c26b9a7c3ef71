"""The states of a message in a worker, by the life of its task.

::

    claimed ─▶ reserved ─▶ in the pool ─▶ started ─▶ over
                  │             │            │         │
               released      vetoed       settled   finished, released or dead-lettered

Celery's default is to acknowledge when the task *starts*. For the broker that is not the end: the tenant's
slot is taken until the task is over. Celery does not report that end to the message. This module therefore
wraps the callbacks that a request passes to ``pool.apply_async``, which every pool calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError, WorkerTerminate
from celery.platforms import EX_FAILURE
from celery.worker import state

from celery_dq.clock import Clock
from celery_dq.compat.pool_flush import guard_flush
from celery_dq.transport.redis.in_flight.message import Message
from celery_dq.worker.failed_tasks import is_crash
from celery_dq.worker.ready_requests import ReadyRequests

logger = logging.getLogger(__name__)


class TaskLifecycle:
    """Tracks the messages in one pool, and ends them with their tasks.

    Args:
        pool: the worker's pool; its ``apply_async`` is replaced on the instance.
        clock: its monotonic time measures how long tasks take.
        dead_letter_failures: keep tasks that failed for good as dead letters.
    """

    def __init__(self, pool: Any, clock: Clock, dead_letter_failures: bool) -> None:
        self._apply = pool.apply_async
        self._clock = clock
        self._dead_letter_failures = dead_letter_failures
        self._in_pool: dict[str, float] = {}
        self._jobs: dict[str, tuple[Any, Any]] = {}
        self._started: dict[str, None] = {}
        #: Delivery tags of messages whose tasks Celery cancels, to be run by another worker.
        self._cancelling: set[str] = set()
        #: Requests that wait for the end of another; None where a task calls back before it starts.
        self.ready_requests: ReadyRequests | None = None
        # A child process has begun before it calls back; a thread or greenlet calls back before it begins.
        self.asks_first = not pool.uses_semaphore
        # A solo pool begins the task, and calls back, inside apply_async.
        self._asks_at_once = isinstance(pool, SoloPool)
        #: Seconds that a task takes, from its start; a moving average, None before the first task.
        self.service_s: float | None = None
        pool.apply_async = self.apply_async
        if self.asks_first:
            self._stop_pool = pool.on_stop
            pool.on_stop = self._stop_then_release

    @property
    def in_pool(self) -> frozenset[str]:
        """Delivery tags of the messages that the pool runs or will run."""
        return frozenset(tuple(self._in_pool))

    @property
    def started(self) -> frozenset[str]:
        """The tags of :attr:`in_pool` whose start can no longer be prevented."""
        return frozenset(tuple(self._started)) if self.asks_first else self.in_pool

    def apply_async(self, target: Any, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """Run a task in the pool, as the pool's own method does.

        Raises:
            TaskRevokedError: this worker may not start the message. Celery frees the pool slot and forgets
            the
                request.
        """
        request: Any = getattr(options.get("callback"), "__self__", None)
        message = getattr(request, "message", None)
        if not isinstance(message, Message):
            return self._apply(target, args, kwargs, **options)
        message.pass_eta_to(request)
        tag: str = message.delivery_tag
        if not self._asks_at_once:
            # For a task that calls back after its start, this is the last check.
            self._veto(request, message, starts=not self.asks_first)
        if message.permit is not None and request.task.acks_late:
            _note_late(message)
        self._in_pool[tag] = self._clock.monotonic()
        self._answer_at_once(request, message)
        self._cancel_for_good(request, tag)
        options["accept_callback"] = self._on_accepted(request, message, options.get("accept_callback"))
        options["callback"] = self._on_over(request, message, options["callback"])
        for name in ("error_callback", "timeout_callback"):
            if options.get(name) is not None:
                wrap = self._on_error if name == "error_callback" else self._on_timeout
                options[name] = wrap(request, message, options[name])
        try:
            job = self._apply(target, args, kwargs, **options)
        except BaseException:
            self._forget(tag)
            raise
        self._jobs[tag] = (job, request)
        if tag not in self._in_pool:
            # A thread has ended the task already. Check after the job was stored, because it may end at any
            # time.
            self._jobs.pop(tag, None)
        return job

    def _stop_then_release(self) -> None:
        """Release the jobs that a pool of threads cancels without a callback when it stops."""
        self._stop_pool()
        for tag, (_, request) in reversed(list(self._jobs.items())):
            if tag not in self._started:
                message = request.message
                self._forget(tag)
                message.channel.qos.forget(tag)
                message.channel.in_flight.release(tag, "unstarted")

    def _answer_at_once(self, request: Any, message: Message) -> None:
        """Put the request's ack or reject into the in-flight messages when Celery decides on it.

        Celery passes it to the event loop as a promise, and may drop promises when a connection breaks.
        """
        ack, reject = request._on_ack, request._on_reject
        tag: str = message.delivery_tag

        def on_ack(*args: Any, **options: Any) -> Any:
            if not message.settles:
                message.channel.basic_finish(tag)
            return ack(*args, **options)

        def on_reject(logger: Any, errors: Any, requeue: bool = False) -> Any:
            message.channel.qos.reject_message(message, requeue)
            return reject(logger, errors, requeue=requeue)

        request._on_ack, request._on_reject = on_ack, on_reject

    def _cancel_for_good(self, request: Any, tag: str) -> None:
        """Requeue a task that a cold shutdown cancels, in pools where Celery takes the task for finished.

        A solo pool cannot terminate a job, and raises an error inside the task, which then fails. A green
        pool kills the greenlet, whose result is that of a success. In both cases Celery would send a late
        ack.
        """
        cancel = request.cancel

        def cancel_for_good(pool: Any, *args: Any, **options: Any) -> Any:
            self._cancelling.add(tag)
            try:
                return cancel(pool, *args, **options)
            except NotImplementedError:
                if isinstance(pool, SoloPool) and tag in self._in_pool:
                    # A signal handler runs on the stack of the task: this error ends both, and the task's own
                    # error handlers do not catch it.
                    raise WorkerTerminate(EX_FAILURE) from None
                self._cancelling.discard(tag)
                raise

        if self.asks_first:
            request.cancel = cancel_for_good

    def guard_flush(self, pool: Any) -> None:
        """Keep the jobs that a prefork pool has begun after a lost connection, and release the others."""
        guard_flush(pool, self._release_others)

    def _release_others(self, kept: frozenset[int]) -> None:
        for tag, (job, request) in list(self._jobs.items()):
            if id(job) not in kept:
                self._forget(tag)
                request.message.channel.in_flight.release(tag, "unstarted")

    def reserve_again(self) -> None:
        """Reserve the slots of the pool's jobs in Celery's state again, after a lost connection.

        Celery 5.5 forgets all reserved requests, later versions those that have not begun. The pool would
        seem empty.
        """
        for _, request in list(self._jobs.values()):
            # The set is weak, so a request that ends just now in another thread leaves it by itself.
            state.reserved_requests.add(request)

    def _veto(self, request: Any, message: Message, *, starts: bool = False) -> None:
        """Refuse to start a message that another worker may have by now.

        Raises:
            TaskRevokedError: the message was refused, and released.
        """
        channel = message.channel
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
        channel.qos.forget(message.delivery_tag)
        channel.in_flight.release(message.delivery_tag, "unstarted")
        state.task_ready(request)
        if self.ready_requests is not None:
            self.ready_requests.end(message.delivery_tag)
        raise TaskRevokedError(request.id)

    def _on_accepted(self, request: Any, message: Message, callback: Any) -> Callable[..., Any]:
        def accepted(pid: int, time_accepted: float) -> Any:
            tag: str = message.delivery_tag
            if self.asks_first:
                message.wait_for_confirmation()
                # The lease may have been lost while the job waited in the pool's queue.
                self._veto(request, message, starts=True)
                if message.permit is not None and request.id in state.revoked and request.revoked():
                    # The pool gets more messages of a singleton queue than it has slots, so one may be
                    # revoked.
                    self._forget(tag)
                    raise TaskRevokedError(request.id)
            self._in_pool[tag] = self._clock.monotonic()
            self._started[tag] = None
            message.started = True
            if not request.task.acks_late:
                message.settles = True
                message.channel.basic_settle(tag)
            return callback(pid, time_accepted)

        return accepted

    def _on_over(self, request: Any, message: Message, callback: Any) -> Callable[..., Any]:
        def over(failed__retval__runtime: Any, **options: Any) -> Any:
            result = failed__retval__runtime
            if message.delivery_tag in self._cancelling and _is_killed(result):
                self._over(request, message)
                return None
            failed = isinstance(result, tuple) and bool(result[0])
            if failed:
                _note_successor(message, getattr(result[1], "exception", None))
            if failed and self._dead_letter_failures:
                self._dead_letter_failure(message, getattr(result[1], "exception", None))
            try:
                return callback(result, **options)
            finally:
                self._over(request, message)

        return over

    def _on_error(self, request: Any, message: Message, callback: Any) -> Callable[..., Any]:
        def error(exc_info: Any, *args: Any, **options: Any) -> Any:
            exc = getattr(exc_info, "exception", None)
            if is_crash(exc_info):
                message.crashed = True
            elif self._dead_letter_failures:
                self._dead_letter_failure(message, exc)
            try:
                return callback(exc_info, *args, **options)
            finally:
                self._over(request, message)

        return error

    def _on_timeout(self, request: Any, message: Message, callback: Any) -> Callable[..., Any]:
        # billiard calls it with keywords, gevent's pool by position.
        def on_timeout(soft: bool, timeout: float) -> Any:
            try:
                return callback(soft, timeout)
            finally:
                if not soft:
                    self._over(request, message)

        return on_timeout

    def _dead_letter_failure(self, message: Message, exc: BaseException | None) -> None:
        exc = getattr(exc, "exc", None) or exc if not isinstance(exc, (Retry, Ignore, Reject)) else exc
        if exc is not None and not isinstance(exc, (Retry, Ignore, Reject)):
            message.dead_letter(f"failed: {type(exc).__name__}: {exc}"[:500])

    def _forget(self, tag: str) -> float | None:
        """Stop counting a message as in the pool; return the time of its start, or of its entry."""
        self._jobs.pop(tag, None)
        self._started.pop(tag, None)
        self._cancelling.discard(tag)
        return self._in_pool.pop(tag, None)

    def _over(self, request: Any, message: Message) -> None:
        started_at = self._forget(message.delivery_tag)
        if started_at is None:
            return
        seen = self._clock.monotonic() - started_at
        self.service_s = seen if self.service_s is None else 0.8 * self.service_s + 0.2 * seen
        if message.settles:
            message.finish()
        elif not request.acknowledged:
            # Celery cancelled the task, and leaves the redelivery to the broker.
            message.channel.qos.forget(message.delivery_tag)
            message.channel.in_flight.release(message.delivery_tag, "requeue")
        if self.ready_requests is not None:
            self.ready_requests.end(message.delivery_tag)


def _note_late(message: Message) -> None:
    """Mark a message that is acknowledged late: it returns after a kill, until the broker has its ack."""
    held = message.channel.in_flight.get(message.delivery_tag)
    if held is not None:
        held.acked_late = True


def _note_successor(message: Message, exc: BaseException | None) -> None:
    """Mark a message whose place a retry or replacement has taken: messages claimed after it must wait."""
    held = message.channel.in_flight.get(message.delivery_tag)
    # An exception from a pool's child may be wrapped. The `exc` of a Retry is the reason of the retry.
    reasons = (exc, getattr(exc, "exc", None))
    if held is not None and any(isinstance(each, (Retry, Ignore)) for each in reasons):
        held.will_return = True


def _is_killed(result: Any) -> bool:
    """Whether the result is the one that a green pool makes for a killed task: it has no run time."""
    return isinstance(result, tuple) and len(result) == 3 and result[2] is None
