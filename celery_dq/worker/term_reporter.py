"""Report to the guard when a message of a singleton queue begins and ends, in the process that runs it.

Celery has signals for that, but two signals cost a fifth of the time of a short task. So this module wraps
the function that Celery makes of each task. Celery makes these functions again in every child of a pool,
and when the worker looks up its tasks again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from celery import signals

from celery_dq.protocols import QUEUE_HEADER, TOKEN_HEADER
from celery_dq.singleton.guard import Guard


class TermReporter:
    """Wraps every task of one worker.

    Args:
        consumer: Celery's consumer; its ``update_strategies`` is replaced.
        guard: gets the reports; it must be made before the pool forks.
    """

    def __init__(self, consumer: Any, guard: Guard) -> None:
        self._app = consumer.app
        self._guard = guard
        Guard.current = guard
        update_strategies = consumer.update_strategies

        def update_then_attend() -> None:
            update_strategies()
            self.attend()

        consumer.update_strategies = update_then_attend
        signals.worker_process_init.connect(self.attend, weak=False)

    def attend(self, **_: Any) -> None:
        """Wrap the functions of all tasks, which Celery has just made."""
        for task in self._app.tasks.values():
            if task.__trace__ is not None:
                task.__trace__ = self._around(task.__trace__)

    def _around(self, trace: Callable[..., Any]) -> Callable[..., Any]:
        begin, end = self._guard.begin, self._guard.end

        @wraps(trace)
        def attended(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
            queue = request.get(QUEUE_HEADER) if request else None
            # A dedup lock has a token too, but no queue.
            if not queue or not request.get(TOKEN_HEADER):
                return trace(uuid, args, kwargs, request)
            begin(queue, request[TOKEN_HEADER])
            try:
                return trace(uuid, args, kwargs, request)
            finally:
                end(queue)

        return attended
