"""What a task's life means for its message.

::

    claimed ─▶ reserved ─▶ in the pool ─▶ started ─▶ over
                  │             │            │         │
               released      vetoed       settled   finished, released or buried

Celery's default is to acknowledge when the task *starts*. To the broker that is
not the end: the tenant's slot is taken until the task is over. Celery tells nobody
about that end, so this module listens where every pool reports: at the callbacks
that a request hands to ``pool.apply_async``.
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
from celery_dq.transport.redis.message import Message
from celery_dq.worker.burial import is_crash
from celery_dq.worker.pool_flush import guard_flush
from celery_dq.worker.turns import Turns

logger = logging.getLogger(__name__)


class Lifecycle:
    """Stands between requests and one pool.

    Arguments:
        pool: the worker's pool; its ``apply_async`` is replaced on the instance.
        clock: monotonic time measures how long tasks take.
        dead_letter_failures: keep tasks that failed for good as dead letters.
    """

    def __init__(self, pool: Any, clock: Clock, dead_letter_failures: bool) -> None:
        self._apply = pool.apply_async
        self._clock = clock
        self._dead_letter_failures = dead_letter_failures
        self._in_pool: dict[str, float] = {}
        self._jobs: dict[str, tuple[Any, Any]] = {}
        self._started: dict[str, None] = {}
        #: Delivery tags of what Celery cancels now, to be run elsewhere.
        self._cancelling: set[str] = set()
        #: What waits for its turn; None where the pool asks first.
        self.turns: Turns | None = None
        # A child process has begun by the time we hear of it; a thread or greenlet asks us first.
        self.asks_first = not pool.uses_semaphore
        # It begins in the very call that gives it to the pool, and asks there.
        self._asks_at_once = isinstance(pool, SoloPool)
        #: Seconds that a task takes, from its start; a moving average, None before the first.
        self.service_s: float | None = None
        pool.apply_async = self.apply_async
        if self.asks_first:
            self._stop_pool = pool.on_stop
            pool.on_stop = self._stop_then_give_back

    @property
    def in_pool(self) -> frozenset[str]:
        """Delivery tags of the messages that the pool runs or will run."""
        return frozenset(tuple(self._in_pool))

    @property
    def started(self) -> frozenset[str]:
        """Those of :attr:`in_pool` that cannot be stopped any more from starting."""
        return frozenset(tuple(self._started)) if self.asks_first else self.in_pool

    def apply_async(self, target: Any, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """Run a task in the pool, as the pool's own method does.

        Raises:
            TaskRevokedError: its message is not ours any more. Celery frees the
                pool slot and forgets the request.
        """
        request: Any = getattr(options.get("callback"), "__self__", None)
        message = getattr(request, "message", None)
        if not isinstance(message, Message):
            return self._apply(target, args, kwargs, **options)
        tag: str = message.delivery_tag
        if not self._asks_at_once:
            # Who does not ask when it begins has its last chance here.
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
            # A thread has ended it meanwhile: asked afterwards, for it may do so at any moment.
            self._jobs.pop(tag, None)
        return job

    def _stop_then_give_back(self) -> None:
        """A pool of threads cancels what waits in its queue, and tells nobody."""
        self._stop_pool()
        for tag, (_, request) in reversed(list(self._jobs.items())):
            if tag not in self._started:
                message = request.message
                self._forget(tag)
                message.channel.qos.forget(tag)
                message.channel.ledger.release(tag, "unstarted")

    def _answer_at_once(self, request: Any, message: Message) -> None:
        """Put the request's ack or reject into the ledger when Celery decides on it.

        Celery hands it to the event loop as a promise, and what is still promised when a
        connection breaks may never be kept.
        """
        ack, reject = request._on_ack, request._on_reject
        tag: str = message.delivery_tag

        def on_ack(*args: Any) -> Any:
            if not message.settles:
                message.channel.basic_finish(tag)
            return ack(*args)

        def on_reject(log: Any, errors: Any, requeue: bool = False) -> Any:
            message.channel.qos.refuse(message, requeue)
            return reject(log, errors, requeue)

        request._on_ack, request._on_reject = on_ack, on_reject

    def _cancel_for_good(self, request: Any, tag: str) -> None:
        """Let a task that a cold shutdown cancels come back, in pools where Celery takes it for over.

        A solo pool cannot terminate a job and says so by an error in the midst of the task, which then fails.
        A green pool kills the greenlet, and its result is that of a success. A late ack would follow both.
        """
        cancel = request.cancel

        def cancel_for_good(pool: Any, *args: Any, **options: Any) -> Any:
            self._cancelling.add(tag)
            try:
                return cancel(pool, *args, **options)
            except NotImplementedError:
                if isinstance(pool, SoloPool) and tag in self._in_pool:
                    # We stand in a signal handler on top of the task: this ends both, and no error handler of
                    # the task takes it for its own.
                    raise WorkerTerminate(EX_FAILURE) from None
                self._cancelling.discard(tag)
                raise

        if self.asks_first:
            request.cancel = cancel_for_good

    def guard_flush(self, pool: Any) -> None:
        """Let what a prefork pool has begun survive a lost connection, and give back the rest."""
        guard_flush(pool, self._give_back_others)

    def _give_back_others(self, kept: frozenset[int]) -> None:
        for tag, (job, request) in list(self._jobs.items()):
            if id(job) not in kept:
                self._forget(tag)
                request.message.channel.ledger.release(tag, "unstarted")

    def reserve_again(self) -> None:
        """Let what the pool has take its slots in Celery's eyes, after a lost connection.

        Celery 5.5 forgets all that it had reserved, later ones what had not begun; the pool would look empty.
        """
        for _, request in list(self._jobs.values()):
            # Known weakly, so what ends just now in another thread is not there for long.
            state.reserved_requests.add(request)

    def _veto(self, request: Any, message: Message, *, starts: bool = False) -> None:
        """Do not start what others may have by now."""
        channel = message.channel
        if message.may_start() if starts else message.may_go():
            return
        if message.may_go():
            logger.info("Task %s[%s] is not started: the one before it comes back.", request.name, request.id)
        else:
            logger.warning(
                "Task %s[%s] is not started: the lease on its message is not fresh, "
                "or the term of its leader.",
                request.name,
                request.id,
            )
        self._forget(message.delivery_tag)
        channel.qos.forget(message.delivery_tag)
        channel.ledger.release(message.delivery_tag, "unstarted")
        state.task_ready(request)
        if self.turns is not None:
            self.turns.over(message.delivery_tag)
        raise TaskRevokedError(request.id)

    def _on_accepted(self, request: Any, message: Message, callback: Any) -> Callable[..., Any]:
        def accepted(pid: int, time_accepted: float) -> Any:
            tag: str = message.delivery_tag
            if self.asks_first:
                # It may have waited in the pool's queue while the lease was lost.
                self._veto(request, message, starts=True)
                if message.permit is not None and request.id in state.revoked and request.revoked():
                    # Of a led queue the pool is given more than it has slots.
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
        def over(result: Any, **options: Any) -> Any:
            if message.delivery_tag in self._cancelling and _is_killed(result):
                self._over(request, message)
                return None
            failed = isinstance(result, tuple) and bool(result[0])
            if failed:
                _note_successor(message, getattr(result[1], "exception", None))
            if failed and self._dead_letter_failures:
                self._bury_failure(message, getattr(result[1], "exception", None))
            try:
                return callback(result, **options)
            finally:
                self._over(request, message)

        return over

    def _on_error(self, request: Any, message: Message, callback: Any) -> Callable[..., Any]:
        def error(info: Any, **options: Any) -> Any:
            exc = getattr(info, "exception", None)
            if is_crash(info):
                message.crashed = True
            elif self._dead_letter_failures:
                self._bury_failure(message, exc)
            try:
                return callback(info, **options)
            finally:
                self._over(request, message)

        return error

    def _on_timeout(self, request: Any, message: Message, callback: Any) -> Callable[..., Any]:
        def timeout(soft: bool, limit: float) -> Any:
            try:
                return callback(soft, limit)
            finally:
                if not soft:
                    self._over(request, message)

        return timeout

    def _bury_failure(self, message: Message, exc: BaseException | None) -> None:
        exc = getattr(exc, "exc", None) or exc if not isinstance(exc, (Retry, Ignore, Reject)) else exc
        if exc is not None and not isinstance(exc, (Retry, Ignore, Reject)):
            message.bury(f"failed: {type(exc).__name__}: {exc}"[:500])

    def _forget(self, tag: str) -> float | None:
        """Stop counting a message as in the pool; return since when it was there or ran."""
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
            # Celery cancelled it and leaves the redelivery to the broker.
            message.channel.qos.forget(message.delivery_tag)
            message.channel.ledger.release(message.delivery_tag, "crashed" if message.crashed else "requeue")
        if self.turns is not None:
            self.turns.over(message.delivery_tag)


def _note_late(message: Message) -> None:
    """However it ends, acknowledged, refused or buried: a kill brings it back until the broker knows."""
    held = message.channel.ledger.get(message.delivery_tag)
    if held is not None:
        held.late = True


def _note_successor(message: Message, exc: BaseException | None) -> None:
    """A retry, or a replacement, has taken the place of the message: what was claimed after it must wait."""
    held = message.channel.ledger.get(message.delivery_tag)
    # What comes from a pool's child may be wrapped; what a retry carries in `exc` is its reason.
    told = (exc, getattr(exc, "exc", None))
    if held is not None and any(isinstance(each, (Retry, Ignore)) for each in told):
        held.comes_back = True


def _is_killed(result: Any) -> bool:
    """Whether a green pool made the result up, because the task was killed: it took no time."""
    return isinstance(result, tuple) and len(result) == 3 and result[2] is None
