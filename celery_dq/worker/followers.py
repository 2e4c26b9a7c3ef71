"""Settles a duplicate with the result of the call that covered it.

A duplicate that carries a chain, chord, group or link, or whose id somebody holds, is kept by the broker
until the covering run is over, and then delivered to be discarded. Celery's own tracer does its
bookkeeping: it is given a task that does nothing but return, or raise, what the covering run did.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Task, states
from celery.app.trace import build_tracer
from kombu.utils.imports import symbol_by_name

from celery_dq.errors import CoveringRunUnknown
from celery_dq.transport.redis.ids import task_id_of
from celery_dq.transport.redis.message import Message

logger = logging.getLogger(__name__)

#: A task's own hooks belong to a run, and there was only one.
_HOOKS = ("before_start", "on_success", "on_failure", "on_retry", "after_return")


class Followers:
    """Settles followers in the worker's main process.

    Arguments:
        consumer: Celery's consumer.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def settle(self, message: Message, covering: str) -> bool:
        """Give a follower the result of a message, and let its callbacks fire.

        Returns:
            False when the covering task was revoked: this one is to be, too.
        """
        app = self._consumer.app
        task = app.tasks[message.headers["task"]]
        task_id = message.headers["id"]
        try:
            outcome = task.backend.get_task_meta(task_id_of(covering), cache=False)
            if outcome["status"] == states.REVOKED:
                return False
            kind = symbol_by_name(task.Request)
            request = kind(message, app=app, task=task, hostname=self._consumer.hostname)
            self.give(request, outcome, task_id_of(covering))
        except Exception:
            # The worker must not die of a result backend that is down.
            logger.exception("%s[%s] could not be given the result of %s.", task.name, task_id, covering)
        message.ack()
        return True

    def give(self, request: Any, outcome: dict[str, Any], covering: str) -> None:
        """Let a request end as the task `covering` did, whose result meta is `outcome`."""
        app, task = self._consumer.app, request.task

        def run(*args: Any, **kwargs: Any) -> Any:
            if outcome["status"] == states.SUCCESS:
                return outcome["result"]
            if outcome["status"] in states.EXCEPTION_STATES and isinstance(outcome["result"], BaseException):
                raise outcome["result"]
            raise CoveringRunUnknown(
                f"{task.name}[{request.id}] was covered by {covering}, whose result is not to be had (state "
                f"{outcome['status']}): store the results of tasks whose duplicates have a chain, chord, "
                "group or link, and keep them long enough"
            )

        kind = type(task)
        hooks = {name: getattr(Task, name) for name in _HOOKS}
        body = {**hooks, "run": staticmethod(run), "__module__": kind.__module__}
        stand_in = type(kind.__name__, (kind,), body)()
        # As Celery's Request.execute does.
        _, _, embed = request._payload
        context = dict(request._request_dict)
        context.update({"is_eager": False}, **embed or {})
        trace = build_tracer(task.name, stand_in, app.loader, self._consumer.hostname, app=app)
        trace(request.id, request.args, request.kwargs, context)
