"""One message of a led queue on its way through Celery, where the broker does not know of leaders.

::

    with Celery ──the pool takes it──▶ in the pool ──its end──────────▶ over
         │  waits for its time, its rate,      └──the pool forgot it──▶ over
         │  its dedup key, a slot
         ├──acknowledged or rejected: it came to no task──────────────▶ over
         └──its term or its connection has ended──▶ given back ───────▶ over

The next message begins when this one is over, so each of these ways must end there. Celery holds on to what
was given back: a timer, or a slot that gets free, brings it to the pool later, and it is refused there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.exceptions import TaskRevokedError
from celery.worker import state

from celery_dq.hooks import QUEUE, TOKEN

logger = logging.getLogger(__name__)


class LedMessage:
    """A message whose turn it is.

    Attributes:
        message: kombu's; it knows this object as ``dq_led``.
        token: of the term in which it may run.
        asks: it was asked for a dedup key, whose holder has it until it comes to the pool.
        in_pool: the pool has it, and tells its end.
        is_over: the next one may begin.

    Arguments:
        queue: the name of the led queue.
        stands: whether something may start in the message's term.
        over: called once, from any thread of the pool, when it is over.
    """

    def __init__(
        self,
        message: Any,
        queue: str,
        token: int,
        stands: Callable[[], bool],
        over: Callable[[LedMessage], None],
    ) -> None:
        self.message = message
        self.token = token
        self.asks = False
        self.in_pool = False
        self.is_over = False
        self._is_given_back = False
        self._queue = queue
        self._stands = stands
        self._tell = over
        self._request: Any = None
        self._execute: Callable[..., Any] | None = None
        self._job: Any = None
        message.dq_led = self
        message.headers[TOKEN], message.headers[QUEUE] = token, queue
        # Celery answers for what is unknown, expired, revoked or declined, and mostly in a later turn of its
        # loop: only the message itself knows when.
        message.ack, message.reject = self._then_over(message.ack), self._then_over(message.reject)

    def _then_over(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        def answer_then_over(*args: Any, **options: Any) -> Any:
            if self._is_given_back:
                return None  # Celery had promised itself this answer; the broker has the message again
            try:
                return answer(*args, **options)
            finally:
                if not self.in_pool:
                    self.end()

        return answer_then_over

    @property
    def is_elsewhere(self) -> bool:
        """Whether it waits for its dedup key: who has given it away would lose the place of its task."""
        return self.asks and self._request is None

    # -- to the pool

    def take(self, request: Any) -> bool:
        """Stand between Celery and the pool; return whether the request may go on."""
        if self.is_over:
            _forget(request)
            return False
        self._request, self._execute = request, request.execute_using_pool
        request.request_dict[TOKEN], request.request_dict[QUEUE] = self.token, self._queue
        revoked = request.revoked

        def is_revoked() -> bool:
            # The last question before the pool gets it, inside of all that stands around that.
            if self.is_over or not self._stands() or revoked():
                return True
            self.in_pool = True
            return False

        request.revoked = is_revoked
        request.execute_using_pool = self._execute_using_pool
        self._hear_of_the_end(request)
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
                # Its term has ended while it waited. Whoever held something for it has let go by now.
                self._return(requeue=True)
            raise
        except BaseException:
            self.in_pool = False
            raise
        return self._job

    def _hear_of_the_end(self, request: Any) -> None:
        timeout = request.on_timeout

        def on_timeout(soft: bool, limit: float) -> Any:
            try:
                return timeout(soft, limit)
            finally:
                if not soft:
                    self.end()

        request.on_success = self._at_the_end(request.on_success)
        request.on_failure = self._at_the_end(request.on_failure)
        request.on_timeout = on_timeout

    def _at_the_end(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        def handle(*args: Any, **options: Any) -> Any:
            try:
                return handler(*args, **options)
            finally:
                self.end()

        return handle

    # -- its end

    def end(self) -> None:
        """It is over, however it ended."""
        if not self.is_over:
            self.is_over = True
            self._tell(self)

    def give_back(self, pool: Any, *, requeue: bool) -> None:
        """End it before the pool has it.

        Arguments:
            pool: the worker's.
            requeue: tell the broker; False when the connection is lost, with which it comes back anyway.
        """
        if self.is_over or self.in_pool:
            return
        self.is_over = True
        if self._execute is not None:
            # It is refused at the pool now rather than later, so that whoever holds something for it lets go
            # first: a dedup key that is still held would have the next delivery taken for a duplicate.
            try:
                self._execute(pool)
            except TaskRevokedError:
                pass
            except Exception:
                logger.warning("What was held for %s is not given back.", self._request, exc_info=True)
        self._return(requeue)

    def flushed(self, kept: frozenset[int], *, requeue: bool) -> None:
        """The pool has forgotten its jobs but these, by ``id``: what it has forgotten does not run."""
        if self.in_pool and not self.is_over and self._job is not None and id(self._job) not in kept:
            self._return(requeue)

    def _return(self, requeue: bool) -> None:
        self.is_over = self._is_given_back = True
        if self._request is not None:
            _forget(self._request)
        try:
            if requeue and not self.message.acknowledged:
                self.message.requeue()
        finally:
            self._tell(self)


def _forget(request: Any) -> None:
    """Take a request out of Celery's lists, and leave a later delivery of the same task there."""
    other = state.requests.get(request.id)
    state.task_ready(request)
    if other is not None and other is not request:
        state.requests[request.id] = other
