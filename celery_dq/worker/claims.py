"""Dedup where the broker cannot help: a worker asks for a task's key before the pool gets it.

::

    received ──▶ asked ──ACCEPT──▶ in the pool ──▶ over
                  │  └───BLOCK───▶ parked ──────▶ in the pool
                  └──────DECLINE─▶ parked until the covering run has a result, or dropped

A parked task holds no slot of the pool. It is not acknowledged, so the broker delivers it anew should this
worker die; the prefetch window grows by one as long as it is parked.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from celery import states
from celery.exceptions import Retry, TaskRevokedError
from celery.worker import state

from celery_dq.clock import Clock
from celery_dq.dedup.coordinator import ClaimSnapshot, Coordinator, Grant, Holding
from celery_dq.dedup.keeper import Keeper
from celery_dq.dedup.machine import Verdict
from celery_dq.dedup.signals import claim_lost
from celery_dq.errors import InvalidKey
from celery_dq.worker.followers import Followers
from celery_dq.worker.retries import delay_of, raised
from celery_dq.worker.wishes import Wish, announce

logger = logging.getLogger(__name__)

#: Seconds after its due time within which a retry must have come, or its key goes on.
RETRY_GRACE = 30.0

#: Seconds within which a covering run must be seen again that left without a result: a key that an operator
#: freed, or whose worker died, is asked for anew.
RESULT_GRACE = 2.0

#: Seconds until a key is asked for again when the coordinator did not answer.
ASK_AGAIN = 1.0


class _Parked(NamedTuple):
    """A call that waits; `ahead` runs, or ran, since before it asked."""

    request: Any
    ahead: str


class _Covered(NamedTuple):
    """A declined call that wants the result of the task that covers it.

    Attributes:
        request: of the call.
        key: the key.
        by: task id of who covers it.
        missing: when that one was first seen to be gone without a result, in monotonic seconds.
    """

    request: Any
    key: str
    by: str
    missing: float | None = None


class Claims:
    """Stands between Celery's consumer and its pool.

    Arguments:
        consumer: Celery's consumer; its ``on_task_request`` is replaced.
        coordinator: gives the verdicts.
        wish_of: what a request asks for, None when its task takes no part.
        clock: monotonic time, for retries that do not come.
    """

    def __init__(
        self, consumer: Any, coordinator: Coordinator, wish_of: Callable[[Any], Wish | None], clock: Clock
    ) -> None:
        self._consumer = consumer
        self._coordinator = coordinator
        self._wish_of = wish_of
        self._clock = clock
        self._run = consumer.on_task_request
        self._followers = Followers(consumer)
        self.keeper: Keeper | None = None
        # Where there is no event loop, the turn of a parked task may come while another one is asked for.
        self._lock = threading.RLock()
        self._waiting: dict[Holding, _Parked] = {}
        self._covered: list[_Covered] = []
        self._looks_again = False
        self._retried: dict[Holding, float] = {}
        self._taken_from: set[Holding] = set()
        self._jobs: dict[Holding, Any] = {}
        consumer.on_task_request = self.ask

    # -- before the pool -------------------------------------------------------

    def ask(self, request: Any) -> Any:
        """Ask for the key of a task, and run, park or drop it."""
        try:
            wish = self._wish_of(request)
        except InvalidKey as exc:
            return self._refuse(request, exc)
        if wish is None:
            return self._run(request)
        with self._lock:
            return self._ask(request, wish)

    def _ask(self, request: Any, wish: Wish) -> Any:
        call = f"{request.id}/{uuid.uuid4().hex}"
        try:
            grant = self._coordinator.enqueue(
                wish.key,
                call,
                task=request.id,
                policy=wish.policy,
                waiting=wish.waiting,
                timeout=wish.timeout,
                follow=_wants_result(request),
            )
        except Exception:
            # Without a verdict it must not run.
            logger.exception(
                "Task %s[%s] waits: its dedup key cannot be asked for.", request.name, request.id
            )
            return self._consumer.timer.call_after(ASK_AGAIN, self.ask, (request,))
        announce(request, wish, grant)
        holding = Holding(wish.key, call, grant.token)
        if grant.verdict is Verdict.DECLINE:
            return self._decline(request, wish.key, grant.covering)
        if grant.token:
            return self._start(request, holding)
        self._park(request)
        self._waiting[holding] = _Parked(request, self._ahead(wish.key, grant))
        return self._hold(holding)

    def _ahead(self, key: str, grant: Grant) -> str:
        if grant.verdict is Verdict.BLOCK:
            return grant.covering
        now = self._coordinator.inspect(key)  # the heir of a run was told of itself
        return now.head.call if now is not None and now.head is not None else ""

    def _refuse(self, request: Any, exc: InvalidKey) -> None:
        """Its arguments make no key: it fails, as it would have at a caller that knew its task."""
        logger.error("Task %s[%s] fails: %s", request.name, request.id, exc)
        state.task_ready(request)
        self._followers.give(request, {"status": states.FAILURE, "result": exc}, request.id)
        request.acknowledge()

    def _hold(self, holding: Holding) -> None:
        if self.keeper is not None:
            self.keeper.hold(holding)

    def _drop(self, holding: Holding) -> None:
        if self.keeper is not None:
            self.keeper.drop(holding)

    def _park(self, request: Any) -> None:
        self._consumer.qos.increment_eventually()

    def _unpark(self, request: Any) -> None:
        self._consumer.qos.decrement_eventually()

    # -- turned away -----------------------------------------------------------

    def _decline(self, request: Any, key: str, covering: str) -> None:
        if covering.partition("/")[0] == request.id:
            # Another delivery of the same task has its place, and will do all that is to be done.
            logger.info("Task %s[%s] has come anew: that delivery goes on.", request.name, request.id)
            state.task_ready(request)
            request.acknowledge()
            return
        logger.info("Task %s[%s] is declined: %s covers it.", request.name, request.id, covering)
        if not _wants_result(request):
            state.task_ready(request)
            request.acknowledge()
            return
        self._park(request)
        self._covered.append(_Covered(request, key, covering.partition("/")[0]))
        self._settle_covered()

    def _settle_covered(self) -> None:
        covered, self._covered = self._covered, []
        for each in covered:
            request = each.request
            if request.id in state.revoked:
                self._unpark(request)
                # Celery's own bookkeeping of a revoked task, on its way to the pool.
                self._run(request)
                continue
            # Asked first: a result is stored before its key is given back.
            now = self._coordinator.inspect(each.key)
            outcome = request.task.backend.get_task_meta(each.by, cache=False)
            if outcome["status"] not in states.READY_STATES:
                later = self._still_covered(each, now)
                if later is not None:
                    self._covered.append(later)
                    continue
            self._unpark(request)
            state.task_ready(request)
            try:
                self._followers.give(request, outcome, each.by)
            finally:
                request.acknowledge()
        if self._covered and self.keeper is not None:
            # It hears of the end of a run elsewhere, and looks at each renewal, should nobody have told.
            self.keeper.start()

    def _still_covered(self, covered: _Covered, now: ClaimSnapshot | None) -> _Covered | None:
        """By whom it is covered as the key stands now; None when nobody will bring a result."""
        claimed = [each for each in (now.tail, now.heir, now.head) if each is not None] if now else []
        # A retry of the covering run is another call of its task.
        if any(each.call.partition("/")[0] == covered.by for each in claimed):
            return covered._replace(missing=None)
        for each in claimed:
            if not each.token:
                # It has the place of the one that did, and has not begun.
                return covered._replace(by=each.call.partition("/")[0], missing=None)
        moment = self._clock.monotonic()
        missing = moment if covered.missing is None else covered.missing
        if moment - missing >= RESULT_GRACE:
            return None
        if not self._looks_again:
            self._looks_again = True
            self._consumer.timer.call_after(RESULT_GRACE, self._look_again)
        return covered._replace(missing=missing)

    def _look_again(self) -> None:
        self._looks_again = False
        self.look()

    # -- running ---------------------------------------------------------------

    def _start(self, request: Any, holding: Holding) -> Any:
        self._hold(holding)
        over = self._when_over(request, holding)
        request.request_dict["dq_token"] = holding.token
        execute = request.execute_using_pool

        def execute_using_pool(pool: Any, **options: Any) -> Any:
            try:
                job = execute(pool, **options)
            except TaskRevokedError:
                over(None)
                raise
            if pool.uses_semaphore:
                # Child processes: we hear of the end in this thread, so it has not come yet.
                self._jobs[holding] = job
            return job

        request.execute_using_pool = execute_using_pool
        return self._run(request)

    def _when_over(self, request: Any, holding: Holding) -> Callable[[BaseException | None], None]:
        success, failure, timeout = request.on_success, request.on_failure, request.on_timeout

        def over(exc: BaseException | None) -> None:
            self._over(holding, exc)

        def on_success(result: Any, **options: Any) -> Any:
            try:
                return success(result, **options)
            finally:
                failed = isinstance(result, tuple) and bool(result[0])
                over(raised(result[1]) if failed else None)

        def on_failure(info: Any, *args: Any, **options: Any) -> Any:
            try:
                return failure(info, *args, **options)
            finally:
                over(raised(info))

        def on_timeout(soft: bool, limit: float) -> Any:
            try:
                return timeout(soft, limit)
            finally:
                if not soft:
                    over(None)

        request.on_success, request.on_failure, request.on_timeout = on_success, on_failure, on_timeout
        return over

    def _over(self, holding: Holding, exc: BaseException | None) -> None:
        self._jobs.pop(holding, None)
        self._drop(holding)
        key, call, token = holding
        if isinstance(exc, Retry):
            # The retry finds its key as it left it, and nobody comes in between.
            if self._coordinator.release(key, call, token):
                waits = Holding(key, call, 0)
                self._retried[waits] = self._clock.monotonic() + delay_of(exc) + RETRY_GRACE
                self._hold(waits)
                now = self._coordinator.inspect(key)
                if now is not None and now.heir is not None:
                    # It has come already, as the heir of the run.
                    self._forget_retried(waits)
        elif not self._coordinator.finish(key, call, token):
            self._taken(holding)
            self._taken_from.discard(holding)
        if self.look_soon is not None:
            self.look_soon()

    # -- whose turn it is ------------------------------------------------------

    #: Called from any thread when :meth:`look` is to be called where tasks may be given to the pool.
    look_soon: Callable[[], None] | None = None

    def look(self) -> None:
        """Start what may start."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        for holding, (request, ahead) in list(self._waiting.items()):
            revoked = request.id in state.revoked
            if revoked:
                self._coordinator.withdraw(holding.key, holding.call)
            token = None if revoked else self._coordinator.start(holding.key, holding.call)
            if token == 0:
                continue
            if self._waiting.pop(holding, None) is None:
                continue
            self._drop(holding)
            self._unpark(request)
            if revoked:
                # Celery's own bookkeeping of a revoked task, on its way to the pool.
                self._run(request)
            elif token is None:
                self._displaced(request, holding.key, ahead)
            else:
                self._start(request, Holding(holding.key, holding.call, token))
        now = self._clock.monotonic()
        for holding, until in list(self._retried.items()):
            if until < now:
                self._forget_retried(holding)
        self._settle_covered()

    def _forget_retried(self, holding: Holding) -> None:
        if self._retried.pop(holding, None) is not None:
            self._drop(holding)
            self._coordinator.withdraw(holding.key, holding.call)

    def forget_parked(self) -> None:
        """The connection is gone, and with it what was not acknowledged: the broker delivers it anew."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._covered = []
        for holding in waiting:
            self._give_back(holding, self._coordinator.withdraw, holding.key, holding.call)

    def flushed(self, kept: frozenset[int]) -> None:
        """The pool has forgotten its jobs but these: what else there was is not run, and comes anew."""
        for holding, job in list(self._jobs.items()):
            if id(job) not in kept:
                self._jobs.pop(holding, None)
                self._give_back(holding, self._coordinator.finish, *holding)

    def _give_back(self, holding: Holding, leave: Callable[..., bool], *args: Any) -> None:
        self._drop(holding)
        try:
            leave(*args)
        except Exception:
            logger.warning("%s could not be given back; its lease runs out.", holding, exc_info=True)

    def lost(self, holding: Holding) -> None:
        """A claim is ours no more: replaced, evicted, or not renewed in time; or a retry has its place."""
        self._retried.pop(holding, None)
        if holding.token:
            self._taken(holding)

    def _taken(self, holding: Holding) -> None:
        """A run has lost its key. Found out at a renewal, and again at its end; told once."""
        if holding in self._taken_from:
            self._taken_from.discard(holding)
            return
        self._taken_from.add(holding)
        key, call, token = holding
        logger.warning("The dedup claim %s was taken from %s.", key, call)
        claim_lost.send(sender=self._coordinator, key=key, task_id=call.partition("/")[0], token=token)

    def _displaced(self, request: Any, key: str, ahead: str) -> None:
        """It waited and lost its place: to one that begins after it, which covers it, or with its lease."""
        now = self._coordinator.inspect(key)
        later = None if now is None else now.tail or now.heir or now.head
        if later is None or later.call == ahead:
            # What runs since before it was called does not cover it.
            self.ask(request)
        else:
            self._decline(request, key, later.call)


def _wants_result(request: Any) -> bool:
    """Whether somebody gets, or is called with, the result of this call."""
    _, _, embed = request._payload
    return not request.ignore_result or any((embed or {}).values())
