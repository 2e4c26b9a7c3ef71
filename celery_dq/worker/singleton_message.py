"""One message of a singleton queue on its way through Celery, on a broker that does not know of leaders.

::

    with Celery ──the pool takes it──▶ in the pool ──its end──────────▶ over
         │  waits for its time, its rate,      └──the pool forgot it──▶ over
         │  its dedup key, a slot
         ├──acknowledged or rejected: it came to no task──────────────▶ over
         └──its term or its connection has ended──▶ released ─────────▶ over

The next message begins when this one is over, so each path must end there. Celery keeps the request of a
released message: a timer, or a slot that gets free, passes it to the pool later, where it is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.exceptions import TaskRevokedError
from celery.worker import state

from celery_dq.protocols import QUEUE_HEADER, TOKEN_HEADER

logger = logging.getLogger(__name__)


class SingletonMessage:
    """The message of a singleton queue that may run now.

    Args:
        message: kombu's message.
        queue: the name of the singleton queue.
        token: the fencing token of the term in which it may run.
        stands: returns whether a message may start in that term.
        over: called once, from any thread of the pool, when the message is over.

    Attributes:
        message: kombu's message, whose attribute ``dq_singleton_message`` is this object.
        token: the fencing token of the term in which it may run.
        asks: a dedup lock was requested for it; the dedup locks of the worker keep it until it gets the lock.
        in_pool: the pool has it, and reports its end.
        is_over: the next message may begin.
    """

    def __init__(
        self,
        message: Any,
        queue: str,
        token: int,
        stands: Callable[[], bool],
        over: Callable[[SingletonMessage], None],
    ) -> None:
        self.message = message
        self.token = token
        self.asks = False
        self.in_pool = False
        self.is_over = False
        self._is_released = False
        self._queue = queue
        self._stands = stands
        self._notify = over
        self._request: Any = None
        self._execute: Callable[..., Any] | None = None
        self._job: Any = None
        message.dq_singleton_message = self
        message.headers[TOKEN_HEADER], message.headers[QUEUE_HEADER] = token, queue
        # Celery acknowledges or rejects an unknown, expired, revoked or declined message, mostly in a later
        # turn of its loop. Only the message's own methods show that moment.
        message.ack, message.reject = self._then_over(message.ack), self._then_over(message.reject)

    def _then_over(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        def answer_then_over(*args: Any, **options: Any) -> Any:
            if self._is_released:
                return None  # a late answer of Celery: the broker has the message again
            try:
                return answer(*args, **options)
            finally:
                if not self.in_pool:
                    self.end()

        return answer_then_over

    @property
    def is_elsewhere(self) -> bool:
        """Whether it waits for its dedup lock; releasing it now would lose the place of its task."""
        return self.asks and self._request is None

    # -- to the pool

    def take(self, request: Any) -> bool:
        """Wrap the request on its way to the pool, and return whether it may continue."""
        if self.is_over:
            _forget(request)
            return False
        self._request, self._execute = request, request.execute_using_pool
        request.request_dict[TOKEN_HEADER], request.request_dict[QUEUE_HEADER] = self.token, self._queue
        revoked = request.revoked

        def is_revoked() -> bool:
            # Celery's last check before the pool gets the request, inside all other wrappers.
            if self.is_over or not self._stands() or revoked():
                return True
            self.in_pool = True
            return False

        request.revoked = is_revoked
        request.execute_using_pool = self._execute_using_pool
        self._on_task_end(request)
        return True

    def _execute_using_pool(self, pool: Any, **options: Any) -> Any:
        assert self._execute is not None
        if self.is_over:
            raise TaskRevokedError(self._request.id)
        try:
            self._job = self._execute(pool, **options)
        except TaskRevokedError:
            if self._request._already_revoked:
                self.end()
            else:
                # Its term has ended while it waited. By now its dedup lock is released.
                self._return(requeue=True)
            raise
        except BaseException:
            self.in_pool = False
            raise
        return self._job

    def _on_task_end(self, request: Any) -> None:
        timed_out = request.on_timeout

        def on_timeout(soft: bool, timeout: float) -> Any:
            try:
                return timed_out(soft, timeout)
            finally:
                if not soft:
                    self.end()

        request.on_success = self._add_end_callback(request.on_success)
        request.on_failure = self._add_end_callback(request.on_failure)
        request.on_timeout = on_timeout

    def _add_end_callback(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        def handle(*args: Any, **options: Any) -> Any:
            try:
                return handler(*args, **options)
            finally:
                self.end()

        return handle

    # -- its end

    def end(self) -> None:
        """Note that the message is over."""
        if not self.is_over:
            self.is_over = True
            self._notify(self)

    def release(self, pool: Any, *, requeue: bool) -> None:
        """Release the message before the pool has it.

        Args:
            pool: the worker's pool.
            requeue: requeue it in the broker; False when the connection is lost, because then the broker
                requeues it.
        """
        if self.is_over or self.in_pool:
            return
        self.is_over = True
        if self._execute is not None:
            # Let the pool refuse it now, so that its dedup lock is released first. Otherwise the next
            # delivery would be taken for a duplicate.
            try:
                self._execute(pool)
            except TaskRevokedError:
                pass
            except Exception:
                logger.warning(
                    "Task %s was released, but may still hold its dedup lock; release it with app.dq.dedup.",
                    self._request,
                    exc_info=True,
                    extra={"event": "singleton_lock_release_failed"},
                )
        self._return(requeue)

    def flushed(self, kept: frozenset[int], *, requeue: bool) -> None:
        """Release the message if the pool has forgotten its job, which then does not run.

        Args:
            kept: the ``id`` of each job that the pool still knows.
            requeue: see :meth:`release`.
        """
        if self.in_pool and not self.is_over and self._job is not None and id(self._job) not in kept:
            self._return(requeue)

    def _return(self, requeue: bool) -> None:
        self.is_over = self._is_released = True
        if self._request is not None:
            _forget(self._request)
        try:
            if requeue and not self.message.acknowledged:
                self.message.requeue()
        finally:
            self._notify(self)


def _forget(request: Any) -> None:
    """Remove a request from Celery's lists, but not a later delivery of the same task."""
    other = state.requests.get(request.id)
    state.task_ready(request)
    if other is not None and other is not request:
        state.requests[request.id] = other
