"""The stage that decides whether a call is buffered.

The first of these that is set decides: the call's option ``buffered``, the block
``with app.dq.buffer.buffered()`` around it, its task's option (``@app.task(buffered=True)``), the setting
``dq_buffer``. Calls with a producer or connection of the caller (beat passes one) are never buffered. Calls
with a dedup key are not buffered unless their verdict may come later: they need their answer at once. So do
calls with ``retry=False``, unless they have the option ``buffered``. A task's own calls are buffered only by
that option or by ``dq_buffer_in_workers``, because the task's message could be acknowledged before them. A
retry or replacement of the running task is never buffered: it must be in the broker before the run ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

from celery.local import Proxy

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.awaited_producer import AwaitedProducer
from celery_dq.app.publishing.pipeline import Call, Proceed
from celery_dq.compat.celery_calls import continued_run, registered_tasks
from celery_dq.options.sections import BufferOptions
from celery_dq.per_process import PerProcess
from celery_dq.producer.buffering_producer import BufferingProducer


class BufferChoice:
    """Decides whether a call is buffered; see the module.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    @cached_property
    def _options(self) -> BufferOptions:
        return dq_of(self._app).buffer.options

    @cached_property
    def block(self) -> ContextVar[bool]:
        """The choice of the block ``with app.dq.buffer.buffered()`` around a call, if there is one."""
        return dq_of(self._app).buffer.wanted

    def wanted(self, asked: bool | None, call: Call) -> bool:
        """Whether to buffer a call without a dedup key.

        Args:
            asked: the call's option ``buffered``.
            call: the call, with its other options.
        """
        options = call.options
        get = options.get
        if (
            get("producer") is not None
            or get("connection") is not None
            or get("publisher") is not None
            or get("router") is not None
        ):
            return False
        if asked is not None:
            return bool(asked) and self.possible(options.get("ignore_result"))
        task = get("task_type")
        if task is None:
            task = registered_tasks(self._app).get(call.name)
        if not self.block.get(self.wanted_by(task)) or get("retry") is False:
            return False
        # The loader knows whether this process is a worker or a child of its pool.
        in_worker = self._app.loader.worker_initialized or call.in_task
        return (self._options.in_workers or not in_worker) and self.possible(options.get("ignore_result"))

    def wanted_by(self, task: Any) -> bool:
        """Whether a task's option, or else the setting, wants calls buffered."""
        wanted = getattr(task, "buffered", None)
        return bool(self._options.enabled if wanted is None else wanted)

    def possible(self, ignored: Any) -> bool:
        """Whether calls can be buffered, by their option ``ignore_result``. It does not change."""
        if not ignored and hasattr(self._app.backend, "binding"):
            # The rpc backend declares its reply queue before each message, on the message's channel.
            return False
        uwsgi = sys.modules.get("uwsgi")
        # Without one of these options no thread of a uWSGI process runs. In the master (0) none ever runs.
        return uwsgi is None or (
            ("enable-threads" in uwsgi.opt or "threads" in uwsgi.opt) and uwsgi.worker_id() != 0
        )


class BufferStage:
    """The stage that gives the buffer's producer to buffered calls.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._choice = BufferChoice(app)
        self._producer = BufferingProducer(self._accept)
        self._sender = PerProcess(lambda: dq_of(app).make_sender(app))

    def send(self, call: Call, proceed: Proceed) -> Any:
        """See :class:`celery_dq.app.publishing.pipeline.Stage`."""
        options = call.options
        asked = options.pop("buffered", None)
        lent = options.get("producer")
        if type(lent) is AwaitedProducer:
            del options["producer"]
            call.producer, lent.call = lent, call
        if call.dedup is not None and call.dedup[0].verdict != "later":
            # The caller gets the covering call, which only the broker knows.
            return proceed(call)
        if continued_run(options.get("task_id")) is not None:
            # A singleton queue gives it the place of the running message, and a dedup key its lock.
            return proceed(call)
        if type(lent) is LazyPoolProducer:
            # Canvas shares one producer between its calls. The user has not chosen it.
            del options["producer"]
        if self._choice.wanted(asked, call):
            if isinstance(call.producer, AwaitedProducer):
                # A coroutine waits for room in the buffer.
                call.producer.buffer_by(self._sender.get().address)
            else:
                call.producer = self._producer
        elif type(lent) is LazyPoolProducer:
            options["producer"] = lent
        return proceed(call)

    def _accept(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> None:
        addressed = self._sender.get().address(message, exchange, routing_key, declare)
        dq_of(self._app).buffer.producer.put(addressed)


class LazyPoolProducer(Proxy):  # type: ignore[type-arg]  # generic in its stubs only
    """A proxy that acquires a producer of the pool at its first use. Its ``type()`` identifies it.

    Groups and chords acquire a producer from the pool and pass it to each of their calls. A call could not
    distinguish it from a producer that the user chose, and a buffered call needs none.
    """


@contextmanager
def _lent(acquire: Callable[[], AbstractContextManager[Any]]) -> Iterator[LazyPoolProducer]:
    """Lend a producer that is acquired at its first use."""
    with ExitStack() as stack:
        taken: list[Any] = []
        is_over = False

        def real() -> Any:
            if is_over and not taken:
                raise RuntimeError("a producer of the pool is used after its release")
            if not taken:
                taken.append(stack.enter_context(acquire()))
            return taken[0]

        try:
            yield LazyPoolProducer(real)
        finally:
            is_over = True


#: The default of ``producer`` in :func:`acquire_lazily`, which differs from an explicit None.
_NOT_GIVEN = object()


def acquire_lazily(app: Any) -> None:
    """Make ``app.producer_or_acquire(None)`` lazy. Call it once per app.

    Celery passes on the producer of its caller, and None when the caller has passed none. A program that
    wants a producer of the pool calls the method without an argument, and has chosen one.
    """
    acquire = app.producer_or_acquire

    def producer_or_acquire(producer: Any = _NOT_GIVEN) -> Any:
        if producer is None:
            return _lent(acquire)
        return acquire() if producer is _NOT_GIVEN else acquire(producer)

    app.producer_or_acquire = producer_or_acquire
