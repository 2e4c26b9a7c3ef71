"""The id and the result of a call: the result's preparation, and the object that the caller gets.

Celery's ids are random UUIDs of version 4. In an app with a queue of several partitions, ids name the tenant
of their call, see :mod:`celery_dq.transport.redis.store.home`. Canvas makes the ids of its tasks
before their tenants are known, so those name none.

Celery calls ``on_task_call`` of the result backend before each publish. The backend on Redis subscribes to
the result there, and retries for 20 s while its server is away. The rpc backend declares its reply queue,
and retries for ever. Neither knows the deadline of the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

from celery.app.task import Task
from celery.result import AsyncResult
from kombu.common import maybe_declare
from vine import promise

from celery_dq.app.api.api import dq_of
from celery_dq.app.mixins import mixed_class
from celery_dq.app.timeouts import Deadline
from celery_dq.compat.celery_calls import join_will_block, own_backend, set_ignored
from celery_dq.per_process import OwnerProcess, current_pid
from celery_dq.producer.buffering_producer import BufferingProducer
from celery_dq.transport.redis.store.home import id_rest, id_start

#: Modules whose backends ask no server before a call. The Redis backend asks none once it was prepared.
NO_SERVER_ASKED = ("celery.backends.base", "celery.backends.redis")
_RPC = "celery.backends.rpc"
#: Number of tenants whose first digits are remembered.
REMEMBERED_TENANTS = 10_000


class Ids:
    """A supply of task ids, as text, for calls that name none.

    Args:
        app: a Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._owner = OwnerProcess()
        #: Ids, or the rests of ids behind the digits of the tenant.
        self._ready: list[str] = []
        self._starts: dict[bytes, str] = {}

    @cached_property
    def name_tenants(self) -> bool:
        """Whether the ids name the tenants of their calls."""
        dq = dq_of(self._app)
        return dq.serves_queues() and any(each.partitions > 1 for each in dq.options.queues)

    def new(self, tenant: bytes) -> str:
        """Return the next id, for a call of this tenant. Thread-safe."""
        if self._owner.pid != current_pid():
            # A forked child would repeat the ids of its parent.
            self._ready, self._owner = [], OwnerProcess()
        try:
            made = self._ready.pop()
        except IndexError:
            made = self._more()
        if not self.name_tenants:
            return made
        return (self._starts.get(tenant) or self._start(tenant)) + made

    def _more(self) -> str:
        # One system call provides the random bytes for 256 ids.
        noise = os.urandom(16 * 256).hex()
        make = id_rest if self.name_tenants else _uuid4
        made = [make(noise[at : at + 32]) for at in range(0, len(noise), 32)]
        last = made.pop()
        self._ready.extend(made)
        return last

    def _start(self, tenant: bytes) -> str:
        if len(self._starts) >= REMEMBERED_TENANTS:
            self._starts.clear()
        start = self._starts[tenant] = id_start(tenant.decode())
        return start


def _uuid4(digits: str) -> str:
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def prepare_for_results(app: Any, deadline: Deadline) -> None:
    """Make the app's result backend keep the deadline of calls. Idempotent.

    Subscribing to a result can wait until a caller asks for the result: Celery then subscribes in any case,
    and reads a result that has arrived before.

    Args:
        app: A Celery app.
        deadline: The deadline of the app's calls.
    """
    backend = app.backend
    if "on_task_call" in backend.__dict__:
        return
    original: Callable[..., Any] = backend.on_task_call
    module = type(backend).on_task_call.__module__

    def on_task_call(producer: Any, task_id: str) -> None:
        if isinstance(producer, BufferingProducer) or module in NO_SERVER_ASKED:
            return
        if module == _RPC:
            _declare_reply_queue(app, backend, producer, deadline)
        else:
            original(producer, task_id)

    backend.on_task_call = on_task_call


def _declare_reply_queue(app: Any, backend: Any, producer: Any, deadline: Deadline) -> None:
    """Do what the rpc backend does, with the retries of a publish."""
    if join_will_block():
        return
    policy = dict(app.conf.task_publish_retry_policy or {}, errback=deadline)
    if not app.conf.task_publish_retry:
        policy["max_retries"] = 0
    maybe_declare(backend.binding(producer.channel), retry=True, **policy)


class FlushingResult:
    """Mixed over the app's ``AsyncResult``: waiting for a result flushes the buffer without lingering."""

    app: Any
    id: str
    parent: Any
    _cache: Any
    _ignored: Any
    _on_fulfilled: Callable[..., Any]

    @classmethod
    def quick(cls, task_id: str, ignored: Any) -> Any:
        """Make the result that ``cls(task_id)`` would be, with a lazy backend and a lazy promise.

        Args:
            task_id: the id of the call.
            ignored: the option ``ignore_result`` of the call.
        """
        made = cls.__new__(cls)
        made.id = task_id
        made.parent = None
        made._cache = None
        made._ignored = ignored
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


def flushing_result_class(app: Any) -> Any:
    """Return the app's ``AsyncResult``, after mixing :class:`FlushingResult` over it."""
    found = app.__dict__.get("AsyncResult") or app.AsyncResult
    if not issubclass(found, FlushingResult):
        found = app.__dict__["AsyncResult"] = mixed_class(found, FlushingResult)
    return found


def result_of(app: Any, task_id: str, result_cls: Any, ignored: Any) -> Any:
    """Make the result of a call that was made from a template, as Celery would make it.

    Args:
        app: the app that made the call.
        task_id: the id of the call.
        result_cls: the option of the call; None for the app's class.
        ignored: the option ``ignore_result`` of the call.
    """
    result_class = flushing_result_class(app)
    made = result_cls or result_class
    # A task makes the app's class of result, with the task's own backend if there is one.
    if result_class.__init__ is AsyncResult.__init__ and (
        made is result_class
        or (getattr(made, "__func__", None) is Task.AsyncResult and own_backend(made.__self__) is None)
    ):
        return result_class.quick(task_id, ignored)
    result = made(task_id)
    set_ignored(result, ignored)
    return result
