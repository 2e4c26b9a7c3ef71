"""Celery's bookkeeping for tasks that must not run: cancelled, expired, covered by another call, or dead.

The broker delivers such a message as a *discard*. Result state, chords, errbacks and events are Celery's, so
a worker passes it to Celery as a revoked, expired or failed task.

The broker keeps a duplicate that has a chain, chord, group or link, or whose id a caller knows. When the
covering run is over, the duplicate is a discard, too. Celery's own tracer does its bookkeeping: it runs a
task that only returns, or raises, the result of the covering run.
"""

from __future__ import annotations

import sys
from typing import Any

from celery import Task, signals, states
from celery.app.trace import build_tracer
from celery.worker import state
from kombu.utils.imports import symbol_by_name

from celery_dq.compat.celery_calls import ending_lost_run
from celery_dq.errors import CoveringRunUnknown, DeliveriesExhausted, DQError, QueueFull
from celery_dq.protocols import FOLLOWS
from celery_dq.shown import shown_logger
from celery_dq.transport.in_flight import Message
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.worker.task_events import task_events

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


#: An expiry that is over on every clock: a worker with a slow clock must not run an expired message.
_LONG_AGO = "1970-01-01T00:00:00+00:00"


class Discards:
    """The discards of a broker of ours; see :class:`celery_dq.protocols.DiscardHandler`.

    Args:
        consumer: Celery's consumer.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._followers = Followers(consumer)

    def deliver_discard(self, message: Message, reason: str) -> bool:
        """Let Celery do its bookkeeping for a task that must not run.

        Args:
            message: the discarded message.
            reason: ``covered:<id>``, ``dead:<reason>``, ``expired``, or another word for a cancelled one.

        Returns:
            False when the message names no task of the app.
        """
        task_id, name = message.headers.get("id"), message.headers.get("task")
        if not (isinstance(task_id, str) and isinstance(name, str) and name in self._consumer.app.tasks):
            return False
        # The callback of kombu's consumer would set it, but a discard does not pass that callback.
        message.accept = self._consumer.task_consumer.accept
        if reason.startswith("covered:") and self._followers.settle(message, reason.partition(":")[2]):
            return True
        if reason.startswith("dead:"):
            fail_task(self._consumer, message, name, reason.partition(":")[2])
        elif reason == "expired":
            message.headers["expires"] = _LONG_AGO
            self._receive(message)
        else:
            # Celery refuses ids in this set. Remove the id again, because a later replay must run.
            known = task_id in state.revoked
            state.revoked.add(task_id)
            try:
                self._receive(message)
            finally:
                if not known:
                    state.revoked.discard(task_id)
        return True

    def _receive(self, message: Message) -> None:
        self._consumer.task_consumer.on_message(message)


def fail_task(consumer: Any, message: Any, name: str, why: str) -> None:
    """Record that the task of a dead letter has failed, and acknowledge the message.

    Args:
        consumer: Celery's consumer.
        message: the message, with its ``deliveries``.
        name: the name of the task, which the app must know.
        why: the reason of the dead letter.
    """
    app = consumer.app
    task = app.tasks[name]
    what = f"{name}[{message.headers['id']}]"
    exc: DQError = DeliveriesExhausted(
        f"{what} was dead-lettered after {message.deliveries} deliveries ({why}): "
        "every worker that ran it was lost. Look for the cause, then replay it from the dead letters."
    )
    if why == "overflow":
        exc = QueueFull(
            f"{what} was pushed out of the backlog of its tenant by newer calls, because max_waiting allows "
            "no more (when_full = 'dead_letter'). Replay it from the dead letters when there is room."
        )
    try:
        request = symbol_by_name(task.Request)(message, app=app, task=task, hostname=consumer.hostname)
        with ending_lost_run(request):
            task.backend.mark_as_failure(
                request.id, exc, request=request._context, store_result=request.store_errors
            )
        try:
            raise exc
        except DQError:
            signals.task_failure.send(
                sender=task,
                task_id=request.id,
                exception=exc,
                args=request.args,
                kwargs=request.kwargs,
                traceback=exc.__traceback__,
                einfo=sys.exc_info(),
            )
    except Exception:
        # The dead letter is stored. A result backend that is down must not end the worker.
        logger.exception(
            "Could not record the failure of task %s[%s]; its dead letter is stored.",
            name,
            message.headers["id"],
            extra={"event": "task_failure_not_recorded"},
        )
    if why == "overflow":  # as its quota asks for, and perhaps often
        logger.info("Task %s", exc, extra={"event": "task_pushed_out"})
    else:
        logger.error("Task %s", exc, extra={"event": "deliveries_exhausted"})
    task_events(consumer).exhausted(message, why)
    message.ack()
