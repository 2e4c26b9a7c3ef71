"""End a duplicate with the result of its covering call.

The broker keeps a duplicate that has a chain, chord, group or link, or whose id a caller knows. When the
covering run is over, the broker delivers the duplicate as a discard. Celery's own tracer does its
bookkeeping: it runs a task that only returns, or raises, the result of the covering run.
"""

from __future__ import annotations

from typing import Any

from celery import Task, states
from celery.app.trace import build_tracer
from kombu.utils.imports import symbol_by_name

from celery_dq.errors import CoveringRunUnknown
from celery_dq.protocols import FOLLOWS
from celery_dq.shown import shown_logger
from celery_dq.transport.in_flight.message import Message
from celery_dq.transport.redis.store.message_ids import task_id_of

logger = shown_logger(__name__)

#: Hooks of a task, which are not called for a duplicate because it does not run.
_HOOKS = ("before_start", "on_success", "on_failure", "on_retry", "after_return")


class Followers:
    """Ends followers in the worker's main process.

    Args:
        consumer: Celery's consumer.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def settle(self, message: Message, covering: str) -> bool:
        """End a follower with the result of its covering message, and call its callbacks.

        Returns:
            False when the covering task was revoked, so that the follower must be revoked too.
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
            # A result backend that is down must not end the worker.
            logger.exception(
                "Task %s[%s] did not receive the result of its covering call %s; it stays without a result.",
                task.name,
                task_id,
                covering,
                extra={"event": "dedup_result_not_received"},
            )
        message.ack()
        return True

    def give(self, request: Any, outcome: dict[str, Any], covering: str) -> None:
        """End a request like its covering task.

        Args:
            request: The request of the duplicate.
            outcome: The result meta of the covering task.
            covering: The id of the covering task.
        """
        app, task = self._consumer.app, request.task

        def run(*args: Any, **kwargs: Any) -> Any:
            if outcome["status"] == states.SUCCESS:
                return outcome["result"]
            if outcome["status"] in states.EXCEPTION_STATES and isinstance(outcome["result"], BaseException):
                raise outcome["result"]
            raise CoveringRunUnknown(
                f"{task.name}[{request.id}] was covered by {covering}, which has no stored result (state "
                f"{outcome['status']}): store the results of tasks whose duplicates have a chain, chord, "
                "group or link, and keep them long enough"
            )

        kind = type(task)
        hooks = {name: getattr(Task, name) for name in _HOOKS}
        body = {**hooks, "run": staticmethod(run), "__module__": kind.__module__}
        stand_in = type(kind.__name__, (kind,), body)()
        # Make the context as Celery's Request.execute does.
        _, _, embed = request._payload
        context = dict(request._request_dict)
        context.update({"is_eager": False, FOLLOWS: True}, **embed or {})
        trace = build_tracer(task.name, stand_in, app.loader, self._consumer.hostname, app=app)
        trace(request.id, request.args, request.kwargs, context)
