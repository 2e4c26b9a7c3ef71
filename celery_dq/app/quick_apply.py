"""A task's ``apply_async`` for plain calls whose message is known already.

Celery's own looks up a dozen options and makes a call with all of them, each time anew. This one is put on
the task object once a plain call of it was learnt. It asks only what may have changed since, and hands
everything but a plain call to Celery's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery.app.task import Task

from celery_dq.app.fast_calls import FastCalls, Plan, in_task

if TYPE_CHECKING:
    from celery_dq.app.calling import BufferedCalls

__all__ = ["QuickApply", "make_quick"]


class QuickApply:
    """Stands on a task in the place of its ``apply_async``.

    :param task: the task.
    :param calls: of its app.
    :param fast: of this process.
    :param plan: of a plain call.
    :param eager: names under which ``task_always_eager`` may be set.
    """

    __slots__ = ("_apply", "_calls", "_eager", "_fast", "_plan", "_task")

    def __init__(
        self, task: Any, calls: BufferedCalls, fast: FastCalls, plan: Plan, eager: tuple[str, ...]
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
        # Found on the class, where monitoring tools put theirs.
        return type(task).apply_async(
            task, args, kwargs, task_id, producer, link, link_error, shadow, **options
        )

    def _still_so(self, task: Any) -> bool:
        """Whether all that made this the quick way still holds."""
        fast, calls = self._fast, self._calls
        if (
            fast.pid != os.getpid()
            or Task.apply_async is not self._apply
            or calls.fast is not fast
            or not fast.allowed
            or calls.in_worker()
        ):
            return False
        changes = task.app.conf.changes
        for name in self._eager:
            if changes.get(name):
                return False
        return calls.wanted_by(task)

    def of(self, fast: FastCalls) -> bool:
        """Whether it was made for these plans."""
        return self._fast is fast


def make_quick(task: Any, calls: BufferedCalls, fast: FastCalls) -> None:
    """Put a :class:`QuickApply` on the task if its plain calls are known and nothing speaks against it."""
    here = task.__dict__.get("apply_async")
    if here is not None and not isinstance(here, QuickApply):
        return
    if isinstance(here, QuickApply) and here.of(fast):
        return
    kind_of_task = type(task)
    own_ways = ("apply_async", "delay", "shadow_name", "_get_exec_options")
    if (
        any(getattr(kind_of_task, name) is not getattr(Task, name) for name in own_ways)
        # A wrapped one belongs to a tool that wants to see every call.
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
    task.__dict__["apply_async"] = QuickApply(
        task, calls, fast, plan, tuple(task.app.conf._to_keys("task_always_eager"))
    )
