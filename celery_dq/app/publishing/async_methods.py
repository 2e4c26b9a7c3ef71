"""The coroutine methods of tasks, signatures and results: ``adelay``, ``aapply_async`` and ``aget``.

They are put on Celery's classes, as the attributes of requests in :mod:`celery_dq.app.mixins`: a task has
them whatever its class, also one that was made before ``celery_dq.setup``. In an app that was not set up,
they run the plain method in a thread. A running task runs the plain method itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from celery.app.task import Task
from celery.canvas import Signature
from celery.result import AsyncResult

from celery_dq.app.publishing.awaited_results import get_result
from celery_dq.compat.celery_calls import in_task


async def aapply_async(task: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
    """Apply the task, and await the answer of the broker; see Celery's ``Task.apply_async``.

    Args:
        task: The task.
        args: Its positional arguments.
        kwargs: Its named arguments.
        options: The options of ``apply_async``. With ``task_always_eager`` the task runs here, as without
            asyncio, and blocks the loop.

    Returns:
        The result of the call, whose ``aget()`` awaits the return value.

    Raises:
        kombu.exceptions.OperationalError: The call could not be sent.
        DuplicateCall: Another call covers this one, and its rule says that this is an error.
    """
    return await _send(task.app, task.apply_async, args, kwargs, **options)


async def adelay(task: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply the task to these arguments, and await the answer of the broker; see :func:`aapply_async`."""
    return await task.aapply_async(args, kwargs)


async def signature_aapply_async(signature: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
    """Apply a signature, and await the answer of the broker; see Celery's ``Signature.apply_async``.

    A chain, a group and a chord are applied in a thread, because Celery may ask the result backend for them.
    The arguments are those of :func:`aapply_async`.
    """
    if type(signature) is not Signature:
        if in_task():
            # Its tasks are children of the running task, which Celery knows by the thread.
            return signature.apply_async(args, kwargs, **options)
        return await asyncio.to_thread(signature.apply_async, args, kwargs, **options)
    return await _send(signature.app, signature.apply_async, args, kwargs, **options)


async def _send(app: Any, send: Callable[..., Any], *args: Any, **options: Any) -> Any:
    calls = vars(app).get("asend_task")
    if calls is not None:
        return await calls.send(send, *args, **options)
    return send(*args, **options) if in_task() else await asyncio.to_thread(send, *args, **options)


async def aget(result: Any, timeout: float | None = None, propagate: bool = True, **options: Any) -> Any:
    """Await the return value of a task; see Celery's ``AsyncResult.get``.

    Args:
        result: The result of a call.
        timeout: Seconds; None waits without a limit.
        propagate: Whether to raise the exception of a failed task, or to return it.
        options: Further options of ``get``, such as ``interval``. A thread runs ``get`` where the backend is
            not Redis.

    Raises:
        celery.exceptions.TimeoutError: The task has not ended in time.
        Exception: The exception of the task.
    """
    return await get_result(result, timeout, propagate, options)


def define_async_methods() -> None:
    """Put the methods on the classes of Celery. Idempotent."""
    methods: tuple[tuple[Any, str, Any], ...] = (
        (Task, "aapply_async", aapply_async),
        (Task, "adelay", adelay),
        (Signature, "aapply_async", signature_aapply_async),
        (Signature, "adelay", adelay),
        (AsyncResult, "aget", aget),
    )
    for kind, name, method in methods:
        setattr(kind, name, method)
