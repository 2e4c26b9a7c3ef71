"""Tells the guard when a message of a led queue begins and ends, in the process that runs it.

Celery has signals for that, but two signals cost as much as a fifth of a short task. So this stands around
the function that Celery has made of each task; it is made anew in every child of a pool, and when the worker
looks up its tasks again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from celery import signals

from celery_dq.hooks import QUEUE, TOKEN
from celery_dq.singleton.guard import Guard


class Attendant:
    """Stands around every task of one worker.

    Arguments:
        consumer: its ``update_strategies`` is replaced.
        guard: must be made before the pool forks.
    """

    def __init__(self, consumer: Any, guard: Guard) -> None:
        self._app = consumer.app
        self._guard = guard
        update_strategies = consumer.update_strategies

        def update_then_attend() -> None:
            update_strategies()
            self.attend()

        consumer.update_strategies = update_then_attend
        signals.worker_process_init.connect(self.attend, weak=False)

    def attend(self, **_: Any) -> None:
        """The functions of all tasks were made anew."""
        for task in self._app.tasks.values():
            if task.__trace__ is not None:
                task.__trace__ = self._around(task.__trace__)

    def _around(self, trace: Callable[..., Any]) -> Callable[..., Any]:
        begin, end = self._guard.begin, self._guard.end

        @wraps(trace)
        def attended(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
            queue = request.get(QUEUE) if request else None
            # A dedup key has a token, too, but no queue beside it.
            if not queue or not request.get(TOKEN):
                return trace(uuid, args, kwargs, request)
            begin(queue, request[TOKEN])
            try:
                return trace(uuid, args, kwargs, request)
            finally:
                end(queue)

        return attended
