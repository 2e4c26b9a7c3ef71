"""Calls without a verdict, because the server that keeps the dedup locks does not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import redis

from celery_dq.clock import Clock
from celery_dq.dedup.coordinator import DedupResult
from celery_dq.other_brokers.dedup_requests import WorkerDedupRequest
from celery_dq.other_brokers.outside_prefetch import OutsidePrefetch
from celery_dq.other_brokers.redis_coordinator import SILENCE
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger

__all__ = ["UnansweredCall", "UnansweredCalls"]

logger = shown_logger(__name__)

#: Seconds until a failed request for a dedup lock is repeated while the server answers.
ASK_AGAIN_S = 1.0

#: How many requests are made in one turn of the event loop after an outage.
ASKED_AT_A_TIME = 100


class UnansweredCall(NamedTuple):
    """A call without a verdict. Repeating the request under the same name has no effect."""

    request: Any
    wanted: WorkerDedupRequest
    call: str


class UnansweredCalls:
    """Keeps calls outside the prefetch until they have a verdict, and decides whether they may request it.

    No method waits for the server: the heartbeat thread notices when the server answers.

    Args:
        hostname: the name of the worker.
        outside: keeps requests outside the prefetch.
        clock: measures outages.
        look_after: schedules a check after that many seconds.
    """

    def __init__(
        self, hostname: str, outside: OutsidePrefetch, clock: Clock, look_after: Callable[[float], None]
    ) -> None:
        self._hostname = hostname
        self._outside = outside
        self._look_after = look_after
        self._outage = Outage(logger, "dedup_outage", clock)
        #: The server has answered since the outage began.
        self._answered = False
        self._calls: list[UnansweredCall] = []
        #: Ids of the tasks whose key was answered by an error.
        self._refused: set[str] = set()

    @property
    def outage(self) -> bool:
        """Return whether the last request got no answer from the server."""
        return self._outage.lasts

    @property
    def may_ask(self) -> bool:
        """Return whether the server is expected to answer."""
        return self._answered or not self._outage.lasts

    def add(self, unasked: UnansweredCall) -> None:
        """Make a call wait for its verdict."""
        self._outside.add(unasked.request)
        self._calls.append(unasked)

    def clear(self) -> None:
        """Forget all calls: the broker delivers them again."""
        self._calls = []
        self._refused.clear()

    def not_answered(self, error: Exception, request: Any) -> None:
        """Log a failed request: a missing answer once per outage, an error once per task."""
        if isinstance(error, SILENCE):
            self.silent(error)
            return
        self._look_after(ASK_AGAIN_S)
        if request.id not in self._refused:
            self._refused.add(request.id)
            logger.error(
                "Task %s[%s] waits: its dedup lock cannot be requested (%s: %s). "
                "The worker repeats the request every %g s.",
                request.name,
                request.id,
                type(error).__name__,
                error,
                ASK_AGAIN_S,
                # The text of a refusal by Redis is complete; any other error is a fault of this package.
                exc_info=None if isinstance(error, redis.ResponseError) else error,
                extra={"event": "dedup_request_failed"},
            )

    def silent(self, error: Exception) -> None:
        """Note that the server does not answer. From any thread."""
        self._answered = False
        self._outage.began(
            "Worker %s gets no answer from the Redis of its dedup locks (%s: %s). Calls with a dedup key "
            "wait outside the prefetch, other tasks continue. Start that Redis again, or check dq_dedup_url.",
            self._hostname,
            type(error).__name__,
            error,
        )

    def answered(self) -> None:
        """Note that the server has answered. From any thread."""
        self._answered = True

    def over(self) -> None:
        """Note that all requests of a check were answered."""
        self._outage.over(
            "Worker %s gets answers from the Redis of its dedup locks again; %d calls request their locks.",
            self._hostname,
            len(self._calls),
        )

    def ask(
        self,
        request_verdict: Callable[[UnansweredCall], tuple[DedupResult, str]],
        obey: Callable[[UnansweredCall, DedupResult, str], Any],
    ) -> None:
        """Request the locks of some of the calls, in their order. Raises when the server does not answer."""
        for _ in range(min(len(self._calls), ASKED_AT_A_TIME)):
            unasked = self._calls[0]
            try:
                answer = request_verdict(unasked)
            except SILENCE:
                raise
            except Exception as error:
                self.not_answered(error, unasked.request)
                self._calls.append(self._calls.pop(0))
                continue
            self._calls.pop(0)
            self._refused.discard(unasked.request.id)
            self._outside.remove(unasked.request)
            obey(unasked, *answer)
        if self._calls:
            self._look_after(ASK_AGAIN_S if self._refused else 0)
