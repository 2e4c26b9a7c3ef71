"""Whether a template may make the message of a call, and a task's ``apply_async`` for plain calls.

Templates skip much of Celery's code. They may do so only as long as no other code has taken its place:
receivers, monitoring tools, events, and code of the app's own. :class:`TemplateChoice` answers this question.

Celery's ``apply_async`` looks up a dozen options at each call. :class:`TaskApplyAsync` replaces it on the
task object once there is a template for plain calls of the task. It checks only conditions that may have
changed since. Every other call goes to Celery's method.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from types import FunctionType
from typing import Any, Literal, TypeAlias

from celery import Celery, signals
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from celery.app.task import Task
from kombu import Producer
from kombu.pools import ProducerPool

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.amqp import DQAmqp
from celery_dq.app.publishing.awaited_producer import AwaitedMessage, AwaitedProducer
from celery_dq.app.publishing.buffer_stage import BufferChoice
from celery_dq.app.publishing.direct_stage import DirectStage
from celery_dq.app.publishing.message_template import MessageTemplate, MessageTemplates, only_adds
from celery_dq.app.publishing.pipeline import CallPipeline, Stage
from celery_dq.app.publishing.results import NO_SERVER_ASKED, result_of
from celery_dq.compat.celery_calls import (
    dumps_pydantic_arguments,
    in_task,
    names_of_setting,
    option_method_is_celerys,
    options_of_plain_call,
    running_tasks,
)
from celery_dq.compat.kombu_messages import json_encoder_is_kombus, publish_prepared
from celery_dq.producer.sender import Addressed
from celery_dq.transport.packer import PackedMessage

#: How a call is sent: from a template, from one by Celery's sender, or without a template.
Answer: TypeAlias = Literal["plain", "observed", "celery"]

#: Settings that Celery reads at each call.
_SETTINGS = ("task_default_queue", "task_send_sent_event")
#: Options of a plain call that do not change its template.
_FILLED = frozenset(("headers", "tenant"))

#: Makes a named tuple without a call of its own ``__new__``.
_addressed = tuple.__new__

_before, _after, _sent = signals.before_task_publish, signals.after_task_publish, signals.task_sent


class TemplateChoice:
    """Decides whether calls of an app may use a template.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._amqp = app.amqp
        self._router = app.amqp.router
        self._sends_event = bool(app.conf.task_send_sent_event)
        self._settings = [*map(app.conf.changes.get, _SETTINGS)]
        #: Names under which ``task_always_eager`` may be set.
        self._eager = names_of_setting(app, "task_always_eager")
        # The look for a name that a program's settings do not have is slow, so it is one name.
        self._set_eager = methodcaller("get", self._eager[0])
        #: None when the app or its class has another one, which has to see each call.
        self._send_task = (
            _original(Celery.send_task, "celery.app.base") if dq_of(app).own_send_task is None else None
        )
        self._publish = _original(Producer.publish, "kombu.messaging")
        self._publish_prepared = _original(publish_prepared(Producer), "kombu.messaging")
        self._stock = self._is_stock()
        self._publishes = (
            dq_of(app).serves_queues() and ProducerPool.Producer is Producer and app.conf.task_publish_retry
        )
        #: Whether the result backend asks a server before each call; None until it matters.
        self._asks_a_server: bool | None = None

    def _is_stock(self) -> bool:
        """Whether Celery's own code routes this app's calls and builds their messages."""
        amqp, conf = self._amqp, self._app.conf
        build = amqp.create_task_message
        return (
            getattr(build, "__func__", None) is AMQP.as_task_v2
            and _original(AMQP.as_task_v2, "celery.app.amqp") is not None
            and [each for each in type(amqp).__mro__ if "_create_task_sender" in vars(each)] == [DQAmqp, AMQP]
            and min(amqp.argsrepr_maxsize, amqp.kwargsrepr_maxsize) >= 1024
            and (conf.task_serializer or "json") == "json"
            and not conf.task_compression
            and all(isinstance(route, MapRoute) for route in amqp.router.routes)
            and json_encoder_is_kombus()
        )

    def answer(self) -> Answer:
        """Return how a plain call is sent now."""
        # The answer is not kept. Whether it still holds would be the same question.
        app, amqp, conf = self._app, self._amqp.__dict__, self._app.conf
        if (
            not self._stock
            or (running_tasks and in_task())
            # `amqp.router` would be slow to read: it is a cached property of kombu.
            or amqp.get("router") is not self._router
            # A program has replaced `app.amqp.send_task_message`, or a tool a method of kombu's producer.
            or amqp.get("send_task_message") is not amqp.get("task_sender")
            or publish_prepared(Producer) is not self._publish_prepared
            or [*map(conf.changes.get, _SETTINGS)] != self._settings
            or any(map(conf.changes.get, self._eager))
            # Between changes and defaults is the program's settings object. Django's tests change it.
            or any(map(self._set_eager, conf.maps[1:-1]))
        ):
            return "celery"
        if (
            self._sends_event
            or _before.receivers
            or _after.receivers
            or _sent.receivers
            or type(app).send_task is not self._send_task
            or Producer.publish is not self._publish
        ):
            return "observed"
        return "plain"

    @property
    def send_task_is_replaced(self) -> bool:
        """Whether a tool or a program has replaced ``send_task``, and has to see each call."""
        return type(self._app).send_task is not self._send_task

    def may_publish(self, ignored: Any) -> bool:
        """Whether a template may be published directly in this app. It does not change.

        Args:
            ignored: the option ``ignore_result`` of the call. Without it, some backends ask a server first.
        """
        if self._asks_a_server is None and not ignored:
            self._asks_a_server = type(self._app.backend).on_task_call.__module__ not in NO_SERVER_ASKED
        return bool(self._publishes and (ignored or not self._asks_a_server))


def _original(method: Any, module: str) -> Any:
    """Return a method that is the one of its library; None when a tool has replaced it."""
    wrapped = hasattr(method, "__wrapped__")
    return (
        method if isinstance(method, FunctionType) and method.__module__ == module and not wrapped else None
    )


class TaskApplyAsync:
    """Replaces ``apply_async`` on one task object.

    Args:
        task: the task.
        templates: the templates of the app.
        template: the template of a plain call of the task.
        choice: decides whether a call uses a template.
        buffer_choice: decides whether a call is buffered.
        direct: publishes calls that are not buffered; None when they have to go Celery's way.
    """

    def __init__(
        self,
        task: Any,
        templates: MessageTemplates,
        template: MessageTemplate,
        choice: TemplateChoice,
        buffer_choice: BufferChoice,
        direct: DirectStage | None,
    ) -> None:
        self._task = task
        self._app = app = task.app
        #: The task's ``ignore_result``, which is in the template, and its options on the way of calls.
        self._ignored, self._buffered = task.ignore_result, getattr(task, "buffered", None)
        self._outbox = getattr(task, "outbox", None)
        self._templates = templates
        self._template = template
        self._choice = choice
        self._buffer_choice = buffer_choice
        self._block, self._wanted = buffer_choice.block, buffer_choice.wanted_by(task)
        self._direct = direct
        #: Puts a message into the buffer; None before the first one.
        self._put: Callable[[Addressed], Any] | None = None
        self._pipeline, self._loader = app.send_task, app.loader
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
            and (producer is None or type(producer) is AwaitedProducer)
            and link is None
            and link_error is None
            and shadow is None
            # The conditions under which this object was made.
            and type(task).apply_async is self._apply
            and self._app.send_task is self._pipeline
            and task.ignore_result is self._ignored
            and getattr(task, "buffered", None) is self._buffered
            and getattr(task, "outbox", None) is self._outbox
            # In a worker, other rules say whether a call is buffered, or fails at once.
            and not self._loader.worker_initialized
            and self._choice.answer() == "plain"
        ):
            if task.typing:
                task.__header__(*(args or ()), **(kwargs or {}))
            filled = self._templates.fill(self._template, args, kwargs, task_id, tenant, headers)
            if filled is not None and (
                self._sent(task, filled) if producer is None else self._taken(task, filled, producer)
            ):
                return result_of(self._app, filled.id, task.AsyncResult, task.ignore_result)
        # Looked up on the class, where monitoring tools replace the method.
        return type(task).apply_async(
            task, args, kwargs, task_id, producer, link, link_error, shadow, **options
        )

    def _sent(self, task: Any, message: PackedMessage) -> bool:
        """Buffer or publish a message; False when the call has to go Celery's way."""
        if self._block.get(self._wanted):
            if self._put is None:
                if not self._buffer_choice.possible(task.ignore_result):
                    return False
                self._put = dq_of(self._app).buffer.producer.put
            self._put(_addressed(Addressed, (self._template.lane, message.id.encode(), message.record)))
            return True
        return self._direct is not None and self._direct.send_plain(self._template.name, message)

    def _taken(self, task: Any, message: PackedMessage, producer: AwaitedProducer) -> bool:
        """Do the same as :meth:`_sent` for an awaited call, whose coroutine sends the message later."""
        if self._block.get(self._wanted):
            if not self._buffer_choice.possible(task.ignore_result):
                return False
            lane = self._template.lane
            producer.buffered.append(_addressed(Addressed, (lane, message.id.encode(), message.record)))
            return True
        if self._direct is None:
            return False
        producer.limits = self._direct.plain_limits(self._template.name)
        producer.messages.append(AwaitedMessage(message))
        return True


def replace_apply_async(
    task: Any, stage: Stage, templates: MessageTemplates, choice: TemplateChoice, buffer_choice: BufferChoice
) -> None:
    """Put a ``TaskApplyAsync`` on the task if there is a template and the task's methods are Celery's."""
    kind_of_task = type(task)
    own_ways = ("apply_async", "delay", "shadow_name")
    pipeline = task.app.send_task
    if (
        "apply_async" in vars(task)
        or type(pipeline) is not CallPipeline
        or stage not in pipeline.stages
        or any(getattr(kind_of_task, name) is not getattr(Task, name) for name in own_ways)
        or not option_method_is_celerys(kind_of_task, Task)
        or _original(Task.apply_async, Task.__module__) is None
        or task.__v2_compat__
        or dumps_pydantic_arguments(task)
    ):
        return
    plain = dict(options_of_plain_call(task), ignore_result=task.ignore_result, task_type=task)
    kind = templates.kind_of(task.name, plain)
    template = None if kind is None else templates.by_kind.get(kind)
    if template is not None:
        direct = next((each for each in pipeline.stages if isinstance(each, DirectStage)), None)
        if not choice.may_publish(task.ignore_result):
            direct = None
        task.__dict__["apply_async"] = TaskApplyAsync(
            task, templates, template, choice, buffer_choice, direct
        )
