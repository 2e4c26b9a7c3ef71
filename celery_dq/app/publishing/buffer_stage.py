"""The stage that decides whether a call is a row of the outbox, or is buffered.

A call in a transaction of a database with an outbox is a row there, if the call's option ``outbox``, its
task's, or the setting ``dq_outbox`` says so. It is published after the commit. Other calls may be buffered.

The first of these that is set decides: the call's option ``buffered``, the block
``with app.dq.buffer.buffered()`` around it, its task's option (``@app.task(buffered=True)``), the setting
``dq_buffer``. Calls with a producer or connection of the caller (beat passes one) are never buffered. Calls
with a dedup key are not buffered unless their verdict may come later: they need their answer at once. So do
calls with ``retry=False``, unless they have the option ``buffered``. A task's own calls are buffered only by
that option or by ``dq_buffer_in_workers``, because the task's message could be acknowledged before them. A
retry or replacement of the running task is never buffered: it must be in the broker before the run ends. The
exception of a retry would end the transaction of its run, so it is not a row either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

from celery.local import Proxy

from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.awaited_producer import AwaitedProducer
from celery_dq.app.publishing.pipeline import Call, Proceed
from celery_dq.compat.celery_calls import continued_run, registered_tasks
from celery_dq.errors import ConfigurationError
from celery_dq.options.sections import BufferOptions
from celery_dq.per_process import PerProcess
from celery_dq.producer.buffering_producer import BufferingProducer
from celery_dq.producer.sender import Addressed


class BufferChoice:
    """Decides whether a call is buffered; see the module.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._outbox = dq_of(app).outbox

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
        if _has_way(options):
            return False
        if asked is not None:
            return bool(asked) and self.possible(options.get("ignore_result"))
        if not self.block.get(self.wanted_by(self._task_of(call))) or options.get("retry") is False:
            return False
        # The loader knows whether this process is a worker or a child of its pool.
        in_worker = self._app.loader.worker_initialized or call.in_task
        return (self._options.in_workers or not in_worker) and self.possible(options.get("ignore_result"))

    def database_for(self, asked: Any, call: Call) -> str | None:
        """Return the database that keeps a call until its transaction has committed; None for other calls.

        Args:
            asked: the call's option ``outbox``.
            call: the call, with its other options.

        Raises:
            ConfigurationError: The option cannot be used for this call.
        """
        wanted = self._outbox.wanted_by(self._task_of(call)) if asked is None else asked
        if not wanted or _has_way(call.options):
            return None
        database = self._outbox.database_for(wanted)
        if database is None:
            return None
        if self._declares_reply_queue(call.options.get("ignore_result")):
            raise ConfigurationError(
                f"{call.name} cannot be a row of the outbox of {database!r}: the result backend 'rpc' "
                "declares a queue at each call; ignore the task's result, use another backend, or call it "
                "with outbox=False"
            )
        if call.dedup is not None and call.dedup[0].on_duplicate == "raise":
            if asked is None:
                return None
            raise ConfigurationError(
                f"{call.name}: outbox = {asked!r} contradicts on_duplicate='raise' of its dedup rule, "
                "because a row has its verdict after the commit; use on_duplicate='decline' or 'replace'"
            )
        return database

    def _task_of(self, call: Call) -> Any:
        task = call.options.get("task_type")
        return registered_tasks(self._app).get(call.name) if task is None else task

    def wanted_by(self, task: Any) -> bool:
        """Whether a task's option, or else the setting, wants calls buffered."""
        wanted = getattr(task, "buffered", None)
        return bool(self._options.enabled if wanted is None else wanted)

    def possible(self, ignored: Any) -> bool:
        """Whether calls can be buffered, by their option ``ignore_result``. It does not change."""
        if self._declares_reply_queue(ignored):
            return False
        uwsgi = sys.modules.get("uwsgi")
        # Without one of these options no thread of a uWSGI process runs. In the master (0) none ever runs.
        return uwsgi is None or (
            ("enable-threads" in uwsgi.opt or "threads" in uwsgi.opt) and uwsgi.worker_id() != 0
        )

    def _declares_reply_queue(self, ignored: Any) -> bool:
        """Whether the backend is rpc, which does so before each message, on the message's channel."""
        return not ignored and hasattr(self._app.backend, "binding")


def _has_way(options: dict[str, Any]) -> bool:
    """Whether the caller has chosen how a call is published."""
    get = options.get
    return (
        get("producer") is not None
        or get("connection") is not None
        or get("publisher") is not None
        or get("router") is not None
    )


class BufferStage:
    """The stage that gives the producer of the outbox or of the buffer to the calls that they keep.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._choice = BufferChoice(app)
        self._sender = PerProcess(lambda: dq_of(app).make_sender(app))
        self._producer = BufferingProducer(
            self._address, lambda packed: dq_of(app).buffer.producer.put(packed)
        )
        #: The producers that insert rows, by the alias of the database.
        self._inserting: dict[str, BufferingProducer] = {}

    def send(self, call: Call, proceed: Proceed) -> Any:
        """See :class:`celery_dq.app.publishing.pipeline.Stage`.

        Raises:
            ConfigurationError: The option ``outbox`` cannot be used.
        """
        options = call.options
        asked, outbox = options.pop("buffered", None), options.pop("outbox", None)
        lent = options.get("producer")
        if type(lent) is AwaitedProducer:
            del options["producer"]
            call.producer, lent.call = lent, call
        if continued_run(options.get("task_id")) is not None:
            # A singleton queue gives it the place of the running message, and a dedup key its lock.
            return proceed(call)
        if type(lent) is LazyPoolProducer:
            # Canvas shares one producer between its calls. The user has not chosen it.
            del options["producer"]
        database = self._choice.database_for(outbox, call)
        if database is not None:
            call.producer = self._producer_for(database)
        elif call.dedup is not None and call.dedup[0].verdict != "later":
            # The caller gets the covering call, which only the broker knows.
            pass
        elif self._choice.wanted(asked, call):
            if isinstance(call.producer, AwaitedProducer):
                # A coroutine waits for room in the buffer.
                call.producer.buffer_by(self._address)
            else:
                call.producer = self._producer
        if call.producer is None and type(lent) is LazyPoolProducer:
            options["producer"] = lent
        return proceed(call)

    def _producer_for(self, database: str) -> BufferingProducer:
        producer = self._inserting.get(database)
        if producer is None:
            insert = partial(dq_of(self._app).outbox.insert, database)
            producer = self._inserting[database] = BufferingProducer(self._address, insert)
        return producer

    def _address(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> Addressed:
        return self._sender.get().address(message, exchange, routing_key, declare)


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
