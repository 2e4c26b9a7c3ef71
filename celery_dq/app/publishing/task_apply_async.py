"""A task's ``apply_async`` for plain calls whose message template is known.

Celery's method looks up a dozen options at each call. This one replaces it on the task object once there is
a template for plain calls of the task. It checks only conditions that may have changed since. Every other
call goes to Celery's method.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from celery.app.task import Task

from celery_dq.app.publishing.message_template import MessageTemplate, MessageTemplates, in_task
from celery_dq.producer.sender import Addressed

__all__ = ["TaskApplyAsync", "replace_apply_async"]


class AppCalls(Protocol):
    """The calls of an app, to which a task's plain calls are added."""

    fast: MessageTemplates | None

    def put(self, message: Addressed) -> None:
        """Add a message to the buffer."""

    def result_of(self, task: Any, task_id: str) -> Any:
        """Return the result object of a call of *task*."""

    def in_worker(self) -> bool:
        """Whether this process is a worker, or a child of its pool."""

    def wanted_by(self, task: Any) -> bool:
        """Whether to buffer a call without the option ``buffered``."""


class TaskApplyAsync:
    """Replaces ``apply_async`` on one task object.

    Args:
        task: the task.
        calls: the buffered calls of its app.
        fast: the message templates of this process.
        plan: the template of a plain call of the task.
        eager: names under which ``task_always_eager`` may be set.
    """

    __slots__ = ("_apply", "_calls", "_eager", "_fast", "_plan", "_task")

    def __init__(
        self,
        task: Any,
        calls: AppCalls,
        fast: MessageTemplates,
        plan: MessageTemplate,
        eager: tuple[str, ...],
    ) -> None:
        self._task = task
        self._calls = calls
        self._fast = fast
        self._plan = plan
        self._eager = eager
        self._apply: Callable[..., Any] = Task.apply_async

    def __call__(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: Any = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: Any = None,
        **options: Any,
    ) -> Any:
        """Apply the task; see Celery's ``Task.apply_async``."""
        task = self._task
        if (
            not options
            and producer is None
            and link is None
            and link_error is None
            and shadow is None
            and self._still_so(task)
            and not in_task()
        ):
            if task.typing:
                task.__header__(*(args or ()), **(kwargs or {}))
            filled = self._fast.fill(self._plan, args, kwargs, task_id)
            if filled is not None:
                self._calls.put(filled[1])
                return self._calls.result_of(task, filled[0])
        # Looked up on the class, where monitoring tools replace the method.
        return type(task).apply_async(
            task, args, kwargs, task_id, producer, link, link_error, shadow, **options
        )

    def _still_so(self, task: Any) -> bool:
        """Whether the conditions under which the template may be used still hold."""
        fast, calls, app = self._fast, self._calls, task.app
        if (
            fast.pid != os.getpid()
            or type(task).apply_async is not self._apply
            or app.send_task is not calls
            or calls.fast is not fast
            or not fast.allowed
            or calls.in_worker()
        ):
            return False
        changes = app.conf.changes
        for name in self._eager:
            if changes.get(name):
                return False
        return bool(calls.wanted_by(task))

    def of(self, fast: MessageTemplates) -> bool:
        """Whether this object was made for these templates."""
        return self._fast is fast


def replace_apply_async(task: Any, calls: AppCalls, fast: MessageTemplates) -> None:
    """Put a ``TaskApplyAsync`` on the task if there is a template and the task's methods are Celery's."""
    here = task.__dict__.get("apply_async")
    if here is not None and not isinstance(here, TaskApplyAsync):
        return
    if isinstance(here, TaskApplyAsync) and here.of(fast):
        return
    kind_of_task = type(task)
    own_ways = ("apply_async", "delay", "shadow_name", "_get_exec_options")
    if (
        task.app.send_task is not calls
        or any(getattr(kind_of_task, name) is not getattr(Task, name) for name in own_ways)
        # A wrapped method belongs to a tool that must see every call.
        or hasattr(Task.apply_async, "__wrapped__")
        or Task.apply_async.__module__ != Task.__module__
        or task.__v2_compat__
        or getattr(task, "_dump_pydantic_arguments", None) is not None
    ):
        return
    plain = dict(task._get_exec_options(), ignore_result=task.ignore_result, task_type=task)
    kind = fast.kind_of(task.name, plain)
    plan = None if kind is None else fast.plan(kind)
    if plan is None:
        return
    task.__dict__["apply_async"] = TaskApplyAsync(
        task, calls, fast, plan, tuple(task.app.conf._to_keys("task_always_eager"))
    )
