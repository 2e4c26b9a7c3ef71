"""Declined calls that want a result: each ends with the result of its covering call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from celery import states
from celery.worker import state

from celery_dq.clock import Clock
from celery_dq.dedup.coordinator import Coordinator, CoordinatorLockSnapshot
from celery_dq.other_brokers.outside_prefetch import OutsidePrefetch
from celery_dq.other_brokers.redis_coordinator import SILENCE
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger
from celery_dq.worker.followers import Followers

__all__ = ["DeclinedCalls", "wants_result"]

logger = shown_logger(__name__)

#: Seconds within which a covering run that left without a result must be seen again. A run whose lock an
#: operator released, or whose worker died, requests its lock again.
RESULT_GRACE = 2.0


class _Covered(NamedTuple):
    """A declined call that wants the result of the task that covers it.

    Attributes:
        request: the request of the declined call.
        key: the dedup key.
        by: task id of the covering call.
        missing: monotonic seconds at which the covering call was first found gone without a result.
    """

    request: Any
    key: str
    by: str
    missing: float | None = None


class DeclinedCalls:
    """Keeps declined calls, outside the prefetch, until there is a result for them.

    Args:
        coordinator: keeps the dedup locks.
        followers: ends a call with the result of another one.
        run: Celery's handler of a request.
        outside: keeps requests outside the prefetch.
        clock: monotonic time.
        look_after: schedules another check after that many seconds.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        followers: Followers,
        run: Callable[[Any], Any],
        outside: OutsidePrefetch,
        clock: Clock,
        look_after: Callable[[float], None],
    ) -> None:
        self._coordinator = coordinator
        self._followers = followers
        self._run = run
        self._outside = outside
        self._clock = clock
        self._look_after = look_after
        self._covered: list[_Covered] = []
        self._backend_outage = Outage(logger, "dedup_results", clock)

    def __len__(self) -> int:
        return len(self._covered)

    def decline(self, request: Any, key: str, covering: str) -> None:
        """Decline a call. :meth:`settle` ends it later if its result is wanted."""
        by = covering.partition("/")[0]
        if by == request.id:
            # Another delivery of the same task has the place of this one, and does all its work.
            logger.info(
                "Task %s[%s] was delivered again; this delivery ends, and the other one continues.",
                request.name,
                request.id,
                extra={"event": "dedup_redelivery_dropped"},
            )
            state.task_ready(request)
            request.acknowledge()
            return
        logger.info(
            "Task %s[%s] was declined: %s covers it.",
            request.name,
            request.id,
            covering,
            extra={"event": "dedup_call_declined"},
        )
        if not wants_result(request):
            state.task_ready(request)
            request.acknowledge()
            return
        self._outside.add(request)
        self._covered.append(_Covered(request, key, by))

    def remember(self, request: Any, covering: str) -> None:
        """Remember the covering call of a call that is declined after a wait, for another delivery of it."""
        if wants_result(request):
            with contextlib.suppress(*SILENCE):  # without it another delivery counts as a new call
                self._coordinator.remember_covered(request.id, covering.partition("/")[0])

    def has_result(self, request: Any, by: str) -> bool:
        """Return whether the result backend has a result of the task `by`."""
        return request.task.backend.get_task_meta(by, cache=False)["status"] in states.READY_STATES

    def clear(self) -> None:
        """Forget all calls: the broker delivers them again."""
        self._covered = []

    def settle(self) -> None:
        """End the calls for which there is a result. Errors of the coordinator are raised."""
        covered, self._covered = self._covered, []
        while covered:
            try:
                self._settle(covered[0])
            except BaseException:
                self._covered += covered
                raise
            covered.pop(0)

    def _settle(self, each: _Covered) -> None:
        request = each.request
        if request.id in state.revoked:
            self._outside.remove(request)
            # On the way to the pool Celery does its bookkeeping of a revoked task.
            self._run(request)
            return
        # Read the lock before the result: a run stores its result before it releases its lock.
        now = self._coordinator.inspect(each.key)
        outcome = self._outcome(each)
        if outcome is None:
            self._covered.append(each)
            return
        if outcome["status"] not in states.READY_STATES:
            later = self._still_covered(each, now)
            if later is not None:
                self._covered.append(later)
                return
        self._outside.remove(request)
        state.task_ready(request)
        try:
            self._followers.give(request, outcome, each.by)
        finally:
            request.acknowledge()
            with contextlib.suppress(*SILENCE):  # it expires
                self._coordinator.forget_covered(request.id)

    def _outcome(self, each: _Covered) -> dict[str, Any] | None:
        """Return the result meta of the covering task; None when the result backend does not answer."""
        try:
            outcome: dict[str, Any] = each.request.task.backend.get_task_meta(each.by, cache=False)
        except Exception as error:
            self._backend_outage.began(
                "The result backend does not answer (%s: %s). Declined calls wait for the result of their "
                "covering call, such as %s for %s; check result_backend.",
                type(error).__name__,
                error,
                each.request.id,
                each.by,
            )
            self._look_after(RESULT_GRACE)
            return None
        self._backend_outage.over("The result backend answers declined calls again.")
        return outcome

    def _still_covered(self, covered: _Covered, now: CoordinatorLockSnapshot | None) -> _Covered | None:
        """Return the call with its present covering call; None when no call will store a result."""
        claimed = [each for each in (now.tail, now.heir, now.head) if each is not None] if now else []
        # A retry of the covering run is another call of the same task.
        if any(each.call.partition("/")[0] == covered.by for each in claimed):
            return covered._replace(missing=None)
        for each in claimed:
            if not each.token:
                # A waiting call, which has not started, covers the declined call instead of the former one.
                return covered._replace(by=each.call.partition("/")[0], missing=None)
        moment = self._clock.monotonic()
        missing = moment if covered.missing is None else covered.missing
        if moment - missing >= RESULT_GRACE:
            return None
        self._look_after(RESULT_GRACE)
        return covered._replace(missing=missing)


def wants_result(request: Any) -> bool:
    """Whether the result of this call is stored, or passed to a callback."""
    _, _, embed = request._payload
    return not request.ignore_result or any((embed or {}).values())
