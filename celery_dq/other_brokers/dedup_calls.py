"""The calls that take part in dedup, on brokers where the worker gives the verdicts.

Calls that wait are outside the prefetch of their worker, so that the broker delivers other messages.
An *unanswered* call has no verdict, because the server that keeps the dedup locks does not answer. A
*declined* call that wants a result ends with the result of its covering call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import redis
from celery import states
from celery.utils.quorum_queues import detect_quorum_queues
from celery.worker import state

from celery_dq.clock import Clock
from celery_dq.dedup.key import Key
from celery_dq.dedup.machine import Coordinator, CoordinatorLockSnapshot, DedupResult
from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.signals import verdict_given
from celery_dq.errors import InvalidKey
from celery_dq.other_brokers.redis_coordinator import REQUEST_ERRORS, SILENCE
from celery_dq.other_brokers.singleton_sequencer import CoveringRun, SingletonMessage
from celery_dq.outage import Outage
from celery_dq.protocols import DEDUP_HEADER
from celery_dq.shown import shown_logger
from celery_dq.worker.discards import Followers

logger = shown_logger(__name__)

#: Limit of the covered calls that are remembered: a queue may be purged.
MOST_COVERED = 10_000


class WorkerDedupRequest(NamedTuple):
    """The request of a task for a dedup lock: the parsed ``dq_claim`` header.

    Attributes:
        key: the dedup key, with the queue in front.
        policy: ``"decline"`` or ``"replace"``.
        waiting: how many calls may wait behind a run, 0 or 1.
        timeout: seconds after which the run may be evicted; None is never.
    """

    key: str
    policy: Any
    waiting: int
    timeout: float | None


class WorkerDedupRequests:
    """Makes the request for a dedup lock of a task, by the header of its message, else by the task's rule."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._keys: dict[str, Key] = {}

    def of(self, request: Any) -> WorkerDedupRequest | None:
        """Return the dedup request of a task, None when it takes no part in dedup.

        A released message of a singleton queue makes no request in this worker.

        Raises:
            InvalidKey: No key can be made of the task's arguments.
        """
        singleton: SingletonMessage | None = getattr(request.message, "dq_singleton_message", None)
        if singleton is not None and singleton.is_over:
            return None
        found = request.request_dict.get(DEDUP_HEADER)
        if found is None:
            rule = rule_of(request.task)
            if rule is None:
                return None
            key = self._keys.get(request.name)
            if key is None:
                key = self._keys[request.name] = Key(rule.name or request.name, request.task.run, rule.key)
            args, kwargs, _ = request._payload
            found = {
                "key": key(args or (), kwargs or {}),
                "timeout": rule.seconds,
                "policy": "replace" if rule.on_duplicate == "replace" else "decline",
                "waiting": rule.waiting,
            }
            # A retry has the key of its message.
            request.request_dict[DEDUP_HEADER] = found
        if not found:
            return None
        if singleton is not None:
            singleton.asks = True
        queue = (request.delivery_info or {}).get("routing_key") or ""
        try:
            key, policy, waiting, timeout = (found[part] for part in ("key", "policy", "waiting", "timeout"))
            limit = None if timeout is None else float(timeout)
            return WorkerDedupRequest(f"{queue}|{key}", str(policy), int(waiting), limit)
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise InvalidKey(
                f"task {request.name}: the header {DEDUP_HEADER} is not as celery-dq writes it ({exc!r})"
            ) from exc


def announce(request: Any, wanted: WorkerDedupRequest, result: DedupResult) -> None:
    """Send the signal of a verdict."""
    verdict_given.send(
        sender=request.name,
        verdict=result.verdict,
        key=wanted.key,
        task_id=request.id,
        covering=result.covering.partition("/")[0],
        replaced=(result.replaced or "").partition("/")[0],
    )


class QueuedCalls:
    """The calls of singleton queues that a run covers, until they get their turn.

    On a singleton queue of a broker that gives no verdicts, one message runs after the other. When a message
    gets its turn, the run before has ended, and its dedup lock is free. So the rule is applied to the
    messages behind it: its run begins after these calls were made, and covers those with its key. A covered
    call is declined when it gets its turn, if that run has taken place. A call behind it that replaces covers
    it.
    """

    def __init__(self) -> None:
        self._covered: dict[str, CoveringRun] = {}

    def covering(
        self, request: Any, wanted: WorkerDedupRequest, behind: Callable[[], Iterable[Mapping[str, Any]]]
    ) -> CoveringRun | str:
        """Return the task id of the call that covers this one; else its run, which covers those behind it.

        Args:
            request: the request of the task.
            wanted: its request for a dedup lock.
            behind: returns the headers of the messages that wait behind it.
        """
        run = self._covered.pop(request.id, None)
        is_retry = bool(request.request_dict.get("retries"))
        if run is not None and run.is_over and run.key == wanted.key and not is_retry:
            return run.task
        queue = (request.delivery_info or {}).get("routing_key") or ""
        calls = []
        for headers in behind():
            asked, task = headers.get(DEDUP_HEADER), headers.get("id")
            # A retry is not a new call.
            if not isinstance(asked, dict) or headers.get("retries"):
                continue
            if f"{queue}|{asked.get('key')}" == wanted.key:
                calls.append((str(task), asked.get("policy")))
        replacing = [task for task, policy in calls if policy == "replace"]
        if replacing and not is_retry:
            return replacing[-1]
        run = CoveringRun(request.id, wanted.key)
        for task, _ in calls:
            self._covered[task] = run
        while len(self._covered) > MOST_COVERED:
            del self._covered[next(iter(self._covered))]
        return run


#: Limit of the requests outside. Further ones count, so that a worker never fetches a whole queue into
#: memory.
MOST_OUTSIDE = 10_000
#: Seconds within which a covering run that left without a result must be seen again. A run whose lock an
#: operator released, or whose worker died, requests its lock again.
RESULT_GRACE = 2.0
#: Seconds until a failed request for a dedup lock is repeated while the server answers.
ASK_AGAIN_S = 1.0
#: How many requests are made in one turn of the event loop after an outage.
ASKED_AT_A_TIME = 100


class OutsidePrefetch:
    """Widens the prefetch of a consumer by one for each waiting request.

    Where RabbitMQ counts by consumer (quorum queues, and all queues since 4.0), it does not change the
    prefetch of an existing consumer. There the worker makes a new consumer. Messages of the old consumer do
    not count for the new one, and stay unacknowledged in the channel.

    Args:
        consumer: Celery's consumer.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._outside: set[int] = set()
        #: Number of requests that wait and count for the present consumer.
        self._counted = 0

    def add(self, request: Any) -> None:
        """Make a request wait outside the prefetch. Idempotent."""
        if len(self._outside) >= MOST_OUTSIDE or id(request) in self._outside:
            return
        self._outside.add(id(request))
        if not self._by_consumer:
            self._consumer.qos.increment_eventually()
            if self._consumer.hub is not None:
                # Celery's loop checks for a change before it waits, and may get a message after the check.
                self._consumer.timer.call_after(0, self._update)
            return
        self._counted += 1
        # Half of the prefetch count: each new consumer lets the worker get that many messages more.
        if self._counted == max(self._consumer.initial_prefetch_count // 2, 1):
            self._consumer.timer.call_after(0, self._consume_again)

    def remove(self, request: Any) -> None:
        """Note that a request does not wait any longer."""
        if id(request) in self._outside:
            self._outside.discard(id(request))
            if not self._by_consumer:
                self._consumer.qos.decrement_eventually()

    def clear(self) -> None:
        """Forget all requests: the connection was lost, and the prefetch count with it."""
        self._outside.clear()
        self._counted = 0

    @property
    def _by_consumer(self) -> bool:
        """Whether the broker counts unacknowledged messages by consumer.

        Celery decides by the same function, but keeps its answer only since 5.7.
        """
        app, transport = self._consumer.app, self._consumer.connection.transport
        return bool(
            app.conf.worker_detect_quorum_queues and detect_quorum_queues(app, transport.driver_type)[0]
        )

    def _update(self) -> None:
        qos = self._consumer.qos
        if qos.prev != qos.value:
            qos.update()

    def _consume_again(self) -> None:
        if self._counted:
            self._counted = 0
            self._consumer.task_consumer.cancel()
            self._consumer.task_consumer.consume()


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
        not_answered: logs a failed request to the coordinator, and schedules another check.
        clock: monotonic time.
        look_after: schedules another check after that many seconds.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        followers: Followers,
        run: Callable[[Any], Any],
        outside: OutsidePrefetch,
        not_answered: Callable[[Exception, Any], None],
        clock: Clock,
        look_after: Callable[[float], None],
    ) -> None:
        self._coordinator = coordinator
        self._followers = followers
        self._run = run
        self._outside = outside
        self._not_answered = not_answered
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
            with contextlib.suppress(*REQUEST_ERRORS):  # without it another delivery counts as a new call
                self._coordinator.remember_covered(request.id, covering.partition("/")[0])

    def has_result(self, request: Any, by: str) -> bool:
        """Return whether the result backend has a result of the task `by`."""
        return request.task.backend.get_task_meta(by, cache=False)["status"] in states.READY_STATES

    def clear(self) -> None:
        """Forget all calls: the broker delivers them again."""
        self._covered = []

    def settle(self) -> None:
        """End the calls for which there is a result. Raises when the server does not answer."""
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
        try:
            now = self._coordinator.inspect(each.key)
        except SILENCE:
            raise
        except redis.ResponseError as error:
            self._not_answered(error, request)
            self._covered.append(each)
            return
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
            with contextlib.suppress(*REQUEST_ERRORS):  # it expires
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
        """Note that the server serves requests."""
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
        if not self._calls:
            self.over()
        is_refused = False
        for _ in range(min(len(self._calls), ASKED_AT_A_TIME)):
            unasked = self._calls[0]
            try:
                answer = request_verdict(unasked)
            except SILENCE:
                raise
            except Exception as error:
                is_refused = True
                self.not_answered(error, unasked.request)
                self._calls.append(self._calls.pop(0))
                continue
            # Only now: a server that refuses writes may have answered all other requests.
            self.over()
            self._calls.pop(0)
            self._refused.discard(unasked.request.id)
            self._outside.remove(unasked.request)
            obey(unasked, *answer)
        if self._calls:
            self._look_after(ASK_AGAIN_S if is_refused else 0)
