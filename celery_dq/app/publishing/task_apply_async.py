"""A task's ``apply_async`` for plain calls whose message template is known, buffered or direct.

Celery's method looks up a dozen options at each call. This one replaces it on the task object once there is
a template for plain calls of the task. It checks only conditions that may have changed since. Every other
call goes to Celery's method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from celery.app.task import Task

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.buffer_stage import BufferChoice
from celery_dq.app.publishing.direct_stage import DirectStage
from celery_dq.app.publishing.message_template import MessageTemplate
from celery_dq.app.publishing.pipeline import Call, CallPipeline, Proceed
from celery_dq.app.publishing.results import result_of
from celery_dq.app.publishing.template_filling import MessageTemplates, only_adds
from celery_dq.compat.celery_calls import (
    dumps_pydantic_arguments,
    in_task,
    names_of_setting,
    option_method_is_celerys,
    options_of_plain_call,
)
from celery_dq.per_process import current_pid
from celery_dq.producer.sender import Addressed

__all__ = ["TaskApplyAsync", "replace_apply_async"]

#: Options of a plain call that do not change its template.
_FILLED = frozenset(("headers", "tenant"))


class HasTemplates(Protocol):
    """The stage with the message templates of this process."""

    def send(self, call: Call, proceed: Proceed) -> Any:
        """See :class:`celery_dq.app.publishing.pipeline.Stage`."""

    def may_publish(self, templates: MessageTemplates, ignored: Any) -> bool:
        """Whether a direct call may be published from a template."""


class TaskApplyAsync:
    """Replaces ``apply_async`` on one task object.

    Args:
        task: the task.
        stage: the stage of the pipeline that has the templates.
        template: the template of a plain call of the task.
        choice: decides whether a call is buffered.
        direct: publishes calls that are not buffered; None when they have to go Celery's way.
    """

    __slots__ = (
        "_app",
        "_apply",
        "_choice",
        "_direct",
        "_eager",
        "_ignored",
        "_pipeline",
        "_put",
        "_task",
        "_template",
        "_templates",
    )

    def __init__(
        self,
        task: Any,
        templates: MessageTemplates,
        template: MessageTemplate,
        choice: BufferChoice,
        direct: DirectStage | None,
    ) -> None:
        self._task = task
        self._app = app = task.app
        #: The task's ``ignore_result``, which is in the template.
        self._ignored = task.ignore_result
        self._templates = templates
        self._template = template
        self._choice = choice
        self._direct = direct
        #: Puts a message into the buffer; None before the first one.
        self._put: Callable[[Addressed], Any] | None = None
        self._pipeline = app.send_task
        #: Names under which ``task_always_eager`` may be set.
        self._eager: tuple[str, ...] = names_of_setting(app, "task_always_eager")
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
        headers, tenant = options.get("headers"), options.get("tenant")
        if (
            (not options or options.keys() <= _FILLED)
            and (not headers or only_adds(headers))
            and producer is None
            and link is None
            and link_error is None
            and shadow is None
            and self._may_use_template(task)
            and not in_task()
        ):
            if task.typing:
                task.__header__(*(args or ()), **(kwargs or {}))
            filled = self._templates.fill(self._template, args, kwargs, task_id, tenant, headers)
            if filled is not None and self._sent(task, filled[1]):
                return result_of(self._app, filled[0], task.AsyncResult, task.ignore_result)
        # Looked up on the class, where monitoring tools replace the method.
        return type(task).apply_async(
            task, args, kwargs, task_id, producer, link, link_error, shadow, **options
        )

    def _may_use_template(self, task: Any) -> bool:
        """Whether the conditions under which the template was learned still hold."""
        templates, app = self._templates, self._app
        if (
            type(task).apply_async is not self._apply
            or app.send_task is not self._pipeline
            or task.ignore_result is not self._ignored
            or templates.owner.pid != current_pid()
            or not templates.observers.allowed
            or templates.observers.observed
            or self._choice.loader.worker_initialized
        ):
            return False
        conf, names = app.conf, self._eager
        # Between changes and defaults is the program's settings object. Django's tests change it at run time.
        # The look for a name that it does not have is slow, so it is one name.
        return not (any(map(conf.changes.get, names)) or any(each.get(names[0]) for each in conf.maps[1:-1]))

    def _sent(self, task: Any, message: Addressed) -> bool:
        """Buffer or publish a message; False when the call has to go Celery's way."""
        if self._choice.wanted_by(task):
            if self._put is None:
                if not self._choice.possible(task.ignore_result):
                    return False
                self._put = dq_of(self._app).buffer.producer.put
            self._put(message)
            return True
        if self._direct is not None and not self._templates.observers.publish_is_replaced:
            return self._direct.send_plain(self._template, message)
        return False

    def of(self, templates: MessageTemplates) -> bool:
        """Whether this object was made for these templates."""
        return self._templates is templates


def replace_apply_async(
    task: Any, stage: HasTemplates, templates: MessageTemplates, choice: BufferChoice
) -> None:
    """Put a ``TaskApplyAsync`` on the task if there is a template and the task's methods are Celery's."""
    here = task.__dict__.get("apply_async")
    if here is not None and not (isinstance(here, TaskApplyAsync) and not here.of(templates)):
        return
    kind_of_task = type(task)
    own_ways = ("apply_async", "delay", "shadow_name")
    pipeline = task.app.send_task
    if (
        type(pipeline) is not CallPipeline
        or stage not in pipeline.stages
        or any(getattr(kind_of_task, name) is not getattr(Task, name) for name in own_ways)
        or not option_method_is_celerys(kind_of_task, Task)
        # A wrapped method belongs to a tool that must see every call.
        or hasattr(Task.apply_async, "__wrapped__")
        or Task.apply_async.__module__ != Task.__module__
        or task.__v2_compat__
        or dumps_pydantic_arguments(task)
    ):
        return
    plain = dict(options_of_plain_call(task), ignore_result=task.ignore_result, task_type=task)
    kind = templates.kind_of(task.name, plain)
    template = None if kind is None else templates.by_kind.get(kind)
    if template is not None:
        direct = next((each for each in pipeline.stages if isinstance(each, DirectStage)), None)
        if not stage.may_publish(templates, task.ignore_result):
            direct = None
        task.__dict__["apply_async"] = TaskApplyAsync(task, templates, template, choice, direct)
