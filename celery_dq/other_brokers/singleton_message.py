"""One message of a singleton queue on its way through Celery, on a broker that does not know of leaders.

::

    with Celery ──the pool takes it──▶ in the pool ──its end──────────▶ over
         │  waits for its time, its rate,      └──the pool forgot it──▶ over
         │  its dedup key, a slot
         ├──acknowledged or rejected: it came to no task──────────────▶ over
        ├──declined: it waits for the result of another call─────────▶ over
         └──its term or its connection has ended──▶ released ─────────▶ over

The next message begins when this one is over, so each path must end there. Celery keeps the request of a
released message: a timer, or a slot that gets free, passes it to the pool later, where it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery.exceptions import TaskRevokedError
from celery.worker import state

from celery_dq.protocols import QUEUE_HEADER, TOKEN_HEADER


class CoveringRun:
    """A run, and whether it has taken place.

    Attributes:
        task: the task id.
        key: the dedup key, with the queue in front.
        is_over: the run has begun and ended.
    """

    def __init__(self, task: str, key: str) -> None:
        self.task = task
        self.key = key
        self.is_over = False


class SingletonMessage:
    """The message of a singleton queue that may run now.

    Args:
        message: kombu's message.
        queue: the name of the singleton queue.
        token: the fencing token of the term in which it may run.
        stands: returns whether a message may start in that term.
        over: called once, from any thread of the pool, when the message is over.
        behind: returns the headers of the messages that wait behind it.

    Attributes:
        message: kombu's message, whose attribute ``dq_singleton_message`` is this object.
        token: the fencing token of the term in which it may run.
        behind: returns the headers of the messages that wait behind it.
        run: its run, which covers calls behind it; None without a dedup key.
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
        behind: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
    ) -> None:
        self.message = message
        self.token = token
        self.behind = behind
        self.run: CoveringRun | None = None
        self.asks = False
        self.in_pool = False
        self.is_over = False
        self._is_released = False
        self._queue = queue
        self._stands = stands
        self._notify = over
        self._request: Any = None
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
        """Give a request the token on its way to the pool, and return whether it may continue."""
        if self.is_over:
            _forget(request)
            return False
        self._request = request
        request.request_dict[TOKEN_HEADER], request.request_dict[QUEUE_HEADER] = self.token, self._queue
        return True

    def enter_pool(self) -> None:
        """Note that the pool gets the message.

        Raises:
            TaskRevokedError: the message is over, or its term is.
        """
        if self.is_over or not self._stands():
            raise TaskRevokedError(self._request.id)
        self.in_pool = True

    def refused(self) -> None:
        """Note that the pool does not get the message: its task is revoked, or its term has ended."""
        if self.is_over:
            return
        if self._request._already_revoked:
            self.end()
        else:
            # Its term has ended while it waited. By now its dedup lock is released.
            self._return(requeue=True)

    # -- its end

    def end(self) -> None:
        """Note that the message is over."""
        if not self.is_over:
            self.is_over = True
            self._notify(self)

    def release(self, refuse: Callable[[Any], None], *, requeue: bool) -> None:
        """Release the message before the pool has it.

        Args:
            refuse: reports that the pool does not get the request, so that its dedup lock is released first.
                Otherwise the next delivery would be taken for a duplicate.
            requeue: requeue it in the broker; False when the connection is lost, because then the broker
                requeues it.
        """
        if self.is_over or self.in_pool:
            return
        self.is_over = True
        if self._request is not None:
            refuse(self._request)
        self._return(requeue)

    def forgotten(self, *, requeue: bool) -> None:
        """Release the message: the pool has dropped its job, which does not run.

        Args:
            requeue: see :meth:`release`.
        """
        if not self.is_over:
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
