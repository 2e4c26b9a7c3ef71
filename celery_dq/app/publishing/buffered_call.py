"""``app.send_task``, which every ``apply_async`` and ``delay`` calls: through the buffer, or not.

The first of these that is set decides whether a call is buffered: its option ``buffered``, the block
``with app.dq.buffer.buffered()`` around it, its task's option (``@app.task(buffered=True)``), the setting
``dq_buffer``. Calls with a producer or connection of the caller (beat passes one) are never buffered. Calls
with a dedup key are not buffered unless their verdict may come later: they need their answer at once. So do
calls with ``retry=False``, unless they have the option ``buffered``. A task's own calls are buffered only by
that option or by ``dq_buffer_in_workers``, because the task's message could be acknowledged before them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from celery._state import _task_stack  # type: ignore[attr-defined]  # not in its stubs
from celery.app.task import Task
from celery.result import AsyncResult
from vine import promise

from celery_dq.app.api.api import dq_of
from celery_dq.app.api.buffer import BufferApi
from celery_dq.app.publishing.deadline import DeadlineCalls
from celery_dq.app.publishing.dedup_call import DedupRules
from celery_dq.app.publishing.lazy_producer import LazyPoolProducer, acquire_lazily
from celery_dq.app.publishing.message_template import MessageTemplates, in_task
from celery_dq.app.publishing.result_preparation import prepare_for_results
from celery_dq.app.publishing.task_apply_async import replace_apply_async
from celery_dq.app.publishing.template_publish import TemplatePublish
from celery_dq.dedup.rule import Dedup
from celery_dq.producer.buffering_producer import BufferingProducer
from celery_dq.producer.sender import Addressed, Sender

__all__ = ["BufferedCalls", "buffer_calls"]


class BufferedCalls:
    """Wraps the app's ``send_task``.

    Args:
        app: a Celery app.
        send_task: the wrapped ``send_task``.
    """

    def __init__(self, app: Any, send_task: Callable[..., Any]) -> None:
        self._app = app
        self._send_task = send_task
        self._stand_in = BufferingProducer(self._accept)
        self._sender: Sender | None = None
        self._dedup = DedupRules(app)
        #: The message templates of this process.
        self.fast: MessageTemplates | None = None

    def __call__(self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send a task by name; see Celery's ``send_task``, and the module for ``buffered``."""
        asked = options.pop("buffered", None)
        found = self._dedup.find(name, options.get("dedup"))
        if found is not None and not _may_wait(found[0], options):
            # The caller gets the covering call, which only the broker knows.
            return self._send_task(name, args, kwargs, *more, **options)
        lent = options.get("producer")
        if type(lent) is LazyPoolProducer:
            # Canvas shares one producer between its calls. The user has not chosen it.
            del options["producer"]
        if more or not self._wanted(asked, name, options):
            if lent is not None:
                options["producer"] = lent
            return self._send_task(name, args, kwargs, *more, **options)
        stand_in = self._stand_in
        fast = self.fast
        if fast is None or fast.pid != os.getpid():
            fast = self._begin()
        if found is None and fast.allowed and not in_task():
            kind = fast.kind_of(name, options)
            if kind is not None:
                plan = fast.plan(kind)
                filled = plan and fast.fill(plan, args, kwargs, options.get("task_id"), options.get("tenant"))
                if filled:
                    self.put(filled[1])
                    task = options.get("task_type")
                    if task is not None:
                        replace_apply_async(task, self, fast)
                    return self.result(filled[0], options)
                if not fast.knows(kind):
                    stand_in = BufferingProducer(partial(self._accept_and_learn, fast, kind))
        self._prepare()
        options["producer"] = stand_in
        return self._send_task(name, args, kwargs, **options)

    @cached_property
    def _loader(self) -> Any:
        return self._app.loader

    @cached_property
    def _buffer(self) -> BufferApi:
        return dq_of(self._app).buffer

    # -- whether

    def _wanted(self, asked: bool | None, name: str, options: dict[str, Any]) -> bool:
        get = options.get
        if (
            get("producer") is not None
            or get("connection") is not None
            or get("publisher") is not None
            or get("router") is not None
        ):
            return False
        if asked is not None:
            return bool(asked) and self._possible(options)
        buffer = self._buffer
        wanted = buffer.wanted
        if wanted is None:
            task = get("task_type")
            if task is None:
                task = self._app._tasks.get(name)
            wanted = getattr(task, "buffered", None)
        if wanted is None:
            wanted = buffer.options.enabled
        if not wanted or get("retry") is False:
            return False
        in_worker = self.in_worker() or in_task()
        return (buffer.options.in_workers or not in_worker) and self._possible(options)

    def in_worker(self) -> bool:
        """Whether this process is a worker, or a child of its pool."""
        return bool(self._loader.worker_initialized)

    def wanted_by(self, task: Any) -> bool:
        """Whether to buffer a call without the option ``buffered``, given that buffering is possible."""
        wanted = self._buffer.wanted
        if wanted is None:
            wanted = getattr(task, "buffered", None)
        return bool(self._buffer.options.enabled if wanted is None else wanted)

    def _possible(self, options: dict[str, Any]) -> bool:
        if not options.get("ignore_result") and hasattr(self._app.backend, "binding"):
            # The rpc backend declares its reply queue before each message, on the message's channel.
            return False
        uwsgi = sys.modules.get("uwsgi")
        # Without one of these options no thread of a uWSGI process runs. In the master (0) none ever runs.
        return uwsgi is None or (
            ("enable-threads" in uwsgi.opt or "threads" in uwsgi.opt) and uwsgi.worker_id() != 0
        )

    # -- how

    def _begin(self) -> MessageTemplates:
        """Make the sender and the message templates of this process."""
        self._sender = dq_of(self._app).make_sender(self._app)
        self.fast = MessageTemplates(self._app)
        return self.fast

    def _prepare(self) -> None:
        prepare_for_results(self._app, dq_of(self._app).deadline)
        self._result_class()

    def _accept(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> None:
        assert self._sender is not None
        self._buffer.producer.put(self._sender.address(message, exchange, routing_key, declare))

    def _accept_and_learn(
        self,
        fast: MessageTemplates,
        kind: tuple[Any, ...],
        message: dict[str, Any],
        exchange: str,
        routing_key: str,
        declare: Any,
    ) -> None:
        assert self._sender is not None
        addressed = self._sender.address(message, exchange, routing_key, declare)
        self._buffer.producer.put(addressed)
        fast.learn(kind, addressed.lane, message, exchange, routing_key)

    def put(self, message: Addressed) -> None:
        """Put a finished message into the buffer."""
        self._buffer.producer.put(message)

    # -- what the caller gets

    def _result_class(self) -> Any:
        found = self._app.AsyncResult
        if not issubclass(found, FlushingResult):
            found = self._app.__dict__["AsyncResult"] = type(
                found.__name__,
                (FlushingResult, found),
                {"__module__": found.__module__, "__doc__": found.__doc__},
            )
        return found

    def result(self, task_id: str, options: dict[str, Any]) -> Any:
        """Make the result of a call that was made from a template, as Celery would make it."""
        result_class = self._app.__dict__.get("AsyncResult") or self._result_class()
        made = options.get("result_cls") or result_class
        # A task makes the app's class of result, with the task's own backend if there is one.
        task = getattr(made, "__self__", None)
        if result_class.__init__ is AsyncResult.__init__ and (
            made is result_class
            or (getattr(made, "__func__", None) is Task.AsyncResult and getattr(task, "_backend", 0) is None)
        ):
            result = result_class.quick(task_id)
        else:
            result = made(task_id)
        result._ignored = options.get("ignore_result")
        return result

    def result_of(self, task: Any, task_id: str) -> Any:
        """Make the result of a plain call of a task that was made from a template."""
        result_class = self._app.__dict__.get("AsyncResult") or self._result_class()
        if (
            task._backend is not None
            or result_class.__init__ is not AsyncResult.__init__
            or type(task).AsyncResult is not Task.AsyncResult
        ):
            return self.result(task_id, {"result_cls": task.AsyncResult, "ignore_result": task.ignore_result})
        result = result_class.quick(task_id)
        result._ignored = task.ignore_result
        return result


def _may_wait(rule: Dedup, options: dict[str, Any]) -> bool:
    """Whether a call with a dedup key may be published after it has returned."""
    if rule.verdict != "later":
        return False
    running = _task_stack.top
    # A message that a run publishes in its own place must be in the broker before the run ends.
    return running is None or running.request.id != options.get("task_id")


class FlushingResult:
    """Mixed over the app's ``AsyncResult``: waiting for a result flushes the buffer without lingering."""

    app: Any
    id: str
    parent: Any
    _cache: Any
    _on_fulfilled: Callable[..., Any]

    @classmethod
    def quick(cls, task_id: str) -> Any:
        """Make the result that ``cls(task_id)`` would be, with a lazy backend and a lazy promise."""
        made = cls.__new__(cls)
        made.id = task_id
        made.parent = None
        made._cache = None
        return made

    @cached_property
    def backend(self) -> Any:
        """The app's backend, which will have the result."""
        return self.app.backend

    @cached_property
    def on_ready(self) -> Any:
        """Celery's promise of the result."""
        return promise(self._on_fulfilled, weak=True)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the result; see Celery's ``AsyncResult.get``."""
        dq_of(self.app).buffer.flush_soon()
        return super().get(*args, **kwargs)  # type: ignore[misc]  # of Celery's AsyncResult

    wait = get  # Celery's old name for it

    def __del__(self) -> None:
        backend = self.__dict__.get("backend")
        if backend is None:
            return  # the result was never requested
        consumer = getattr(backend, "result_consumer", None)
        if consumer is None or getattr(consumer, "subscribed_to", True):
            super().__del__()  # type: ignore[misc]  # of Celery's AsyncResult


def buffer_calls(app: Any) -> None:
    """Wrap the app's ``send_task`` in :class:`BufferedCalls`. Call it once per app."""
    app.send_task = BufferedCalls(app, DeadlineCalls(app, TemplatePublish(app, app.send_task)))
    acquire_lazily(app)
