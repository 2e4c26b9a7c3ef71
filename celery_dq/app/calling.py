"""``app.send_task``, to which every ``apply_async`` and ``delay`` comes down: through the buffer, or not.

A call is buffered when it says so (``buffered=True``), or a ``with app.dq.buffer.buffered()`` around it does,
or its task (``@app.task(buffered=True)``), or else the setting ``dq_buffer``. Never are calls with a producer
or connection of the caller's (beat passes one), calls with a dedup key (unless their verdict may come later),
calls with ``retry=False`` (both want to know at once), and, unless asked for, what a task publishes: its own
message would be acknowledged first.
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

from celery_dq.app.buffer import Buffer
from celery_dq.app.direct_calls import DirectCalls
from celery_dq.app.duplicates import DedupRules
from celery_dq.app.face import dq_of
from celery_dq.app.fast_calls import FastCalls, in_task
from celery_dq.app.plain_calls import PlainCalls
from celery_dq.app.pool_producer import PoolProducer, lend_lazily
from celery_dq.app.quick_apply import make_quick
from celery_dq.dedup.rule import Dedup
from celery_dq.producer.sender import Addressed, Sender
from celery_dq.producer.stand_in import StandIn

__all__ = ["BufferedCalls", "buffer_calls"]


class BufferedCalls:
    """Stands in for the app's ``send_task``.

    :param app: a Celery app.
    :param send_task: its own.
    """

    def __init__(self, app: Any, send_task: Callable[..., Any]) -> None:
        self._app = app
        self._send_task = send_task
        self._stand_in = StandIn(self._accept)
        self._sender: Sender | None = None
        self._dedup = DedupRules(app)
        #: The templates of this process.
        self.fast: FastCalls | None = None

    def __call__(self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send a task by name; see Celery's ``send_task``, and the module for ``buffered``."""
        asked = options.pop("buffered", None)
        found = self._dedup.find(name, options.get("dedup"))
        if found is not None and not _may_wait(found[0], options):
            # The caller is told who covers his call, and that only the broker knows.
            return self._send_task(name, args, kwargs, *more, **options)
        lent = options.get("producer")
        if type(lent) is PoolProducer:
            # Canvas shares one producer between its calls; nobody has chosen it.
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
                        make_quick(task, self, fast)
                    return self.result(filled[0], options)
                if not fast.knows(kind):
                    stand_in = StandIn(partial(self._accept_and_learn, fast, kind))
        self._prepare()
        options["producer"] = stand_in
        return self._send_task(name, args, kwargs, **options)

    @cached_property
    def _loader(self) -> Any:
        return self._app.loader

    @cached_property
    def _buffer(self) -> Buffer:
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
        """Whether this is a worker, or a child of its pool."""
        return bool(self._loader.worker_initialized)

    def wanted_by(self, task: Any) -> bool:
        """Whether a call that does not say itself is to be buffered; that it is possible is known."""
        wanted = self._buffer.wanted
        if wanted is None:
            wanted = getattr(task, "buffered", None)
        return bool(self._buffer.options.enabled if wanted is None else wanted)

    def _possible(self, options: dict[str, Any]) -> bool:
        if not options.get("ignore_result") and hasattr(self._app.backend, "binding"):
            # The rpc backend declares its reply queue before each message, on the message's channel.
            return False
        uwsgi = sys.modules.get("uwsgi")
        # Without that option no thread of a uWSGI process ever runs, and in its master (0) none does anyway.
        return uwsgi is None or (
            ("enable-threads" in uwsgi.opt or "threads" in uwsgi.opt) and uwsgi.worker_id() != 0
        )

    # -- how

    def _begin(self) -> FastCalls:
        """What a process needs of its own."""
        self._sender = dq_of(self._app).make_sender(self._app)
        self.fast = FastCalls(self._app)
        return self.fast

    def _prepare(self) -> None:
        backend = self._app.backend
        if "on_task_call" not in backend.__dict__:
            backend.on_task_call = _UnlessBuffered(backend.on_task_call)
        self._result_class()

    def _accept(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> None:
        assert self._sender is not None
        self._buffer.producer.put(self._sender.address(message, exchange, routing_key, declare))

    def _accept_and_learn(
        self,
        fast: FastCalls,
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
        if not issubclass(found, HurryingResult):
            found = self._app.__dict__["AsyncResult"] = type(
                found.__name__,
                (HurryingResult, found),
                {"__module__": found.__module__, "__doc__": found.__doc__},
            )
        return found

    def result(self, task_id: str, options: dict[str, Any]) -> Any:
        """The result of a call that went the quick way, as Celery would make it."""
        result_class = self._app.__dict__.get("AsyncResult") or self._result_class()
        made = options.get("result_cls") or result_class
        # A task makes the app's kind of result, with its own backend if it has one.
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
        """The result of a plain call of a task that went the quick way."""
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
    # What a run publishes in its own place must be there before the run has ended.
    return running is None or running.request.id != options.get("task_id")


class _UnlessBuffered:
    """A backend's ``on_task_call``: subscribing to the result can wait until somebody asks for it.

    It needs a server, and a buffered call needs none. Celery subscribes anyway when a result is waited for.
    """

    def __init__(self, on_task_call: Callable[..., Any]) -> None:
        self._on_task_call = on_task_call

    def __call__(self, producer: Any, task_id: str) -> Any:
        return None if isinstance(producer, StandIn) else self._on_task_call(producer, task_id)


class HurryingResult:
    """Mixed over the app's ``AsyncResult``: who waits for a task does not want it to linger."""

    app: Any
    id: str
    parent: Any
    _cache: Any
    _on_fulfilled: Callable[..., Any]

    @classmethod
    def quick(cls, task_id: str) -> Any:
        """The result that ``cls(task_id)`` would be; backend and promise are found when asked for."""
        made = cls.__new__(cls)
        made.id = task_id
        made.parent = None
        made._cache = None
        return made

    @cached_property
    def backend(self) -> Any:
        """Where the result will be: the app's backend."""
        return self.app.backend

    @cached_property
    def on_ready(self) -> Any:
        """Celery's promise of the result."""
        return promise(self._on_fulfilled, weak=True)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the result; see Celery's ``AsyncResult.get``."""
        dq_of(self.app).buffer.hurry()
        return super().get(*args, **kwargs)  # type: ignore[misc]  # of Celery's AsyncResult

    wait = get  # Celery's old name for it

    def __del__(self) -> None:
        backend = self.__dict__.get("backend")
        if backend is None:
            return  # nobody ever asked for the result
        consumer = getattr(backend, "result_consumer", None)
        if consumer is None or getattr(consumer, "subscribed_to", True):
            super().__del__()  # type: ignore[misc]  # of Celery's AsyncResult


def buffer_calls(app: Any) -> None:
    """Put :class:`BufferedCalls` before the app's ``send_task``. To be called once."""
    app.send_task = BufferedCalls(app, DirectCalls(app, PlainCalls(app, app.send_task)))
    lend_lazily(app)
