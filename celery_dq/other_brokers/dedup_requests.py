"""The requests for dedup locks of tasks, on brokers where the worker gives the verdicts; covered calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from celery_dq.dedup.coordinator import DedupResult
from celery_dq.dedup.key import Key
from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.signals import verdict_given
from celery_dq.errors import InvalidKey
from celery_dq.other_brokers.singleton_message import CoveringRun, SingletonMessage
from celery_dq.protocols import DEDUP_HEADER

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
