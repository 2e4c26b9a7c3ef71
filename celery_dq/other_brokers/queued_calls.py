"""Dedup on a singleton queue of a broker that gives no verdicts, where one message runs after the other.

When a message gets its turn, the run before has ended, and its dedup lock is free. So the rule is applied to
the messages behind it: its run begins after these calls were made, and covers those with its key. A covered
call is declined when it gets its turn, if that run has taken place. A call behind it that replaces covers it.

The worker sees :data:`MOST` messages, where the broker shows them: on Redis and ZooKeeper, and on AMQP those
that it has been sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kombu.transport.redis import Channel as RedisChannel

from celery_dq.other_brokers.dedup_requests import WorkerDedupRequest
from celery_dq.other_brokers.singleton_message import CoveringRun
from celery_dq.protocols import DEDUP_HEADER

__all__ = ["MOST", "QueuedCalls", "waiting_headers"]

#: Number of messages behind the present one that are read.
MOST = 100
#: Limit of the covered calls that are remembered: a queue may be purged.
MOST_COVERED = 10_000


class QueuedCalls:
    """The calls of singleton queues that a run covers, until they get their turn."""

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


def waiting_headers(channel: Any, queue: str) -> list[Mapping[str, Any]]:
    """Return the headers of the next messages of a queue; none for a broker that does not show them."""
    if isinstance(channel, RedisChannel):
        found: list[Any] = []
        for step in channel.priority_steps:
            key = f"{queue}{channel.sep}{step}" if step else queue
            found += reversed(channel.client.lrange(key, -MOST, -1))
        return [headers for each in found[:MOST] if (headers := _headers(each))]
    read = getattr(channel, "waiting_headers", None)  # that of ZooKeeper
    return [] if read is None else list(read(queue, MOST))


def _headers(raw: Any) -> Mapping[str, Any]:
    try:
        headers = json.loads(raw)["headers"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return headers if isinstance(headers, dict) else {}
