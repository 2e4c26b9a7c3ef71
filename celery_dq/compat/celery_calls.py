"""Private names of Celery on the way of a call: the running task, the app, the task, the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from celery import _state, signals
from celery.app import amqp as _amqp

from celery_dq.compat.guard import check

check("celery_calls")

_celerys: Any = _state
_stack: Any = _celerys._task_stack
#: Celery's storage of the stacks of running tasks, empty while no thread runs a task. True where it has none.
running_tasks: Any = getattr(getattr(_stack, "_local", None), "__storage__", True)

#: Whether this process waits for results, so that it must not declare a queue for them.
join_will_block = _celerys.task_join_will_block

#: Whether Celery publishes what continues a run that has ended; None before Celery 5.7.
_publishes_callback: ContextVar[bool] | None = getattr(_amqp, "_callback_publish_retry", None)

#: Celery's task with which some result backends poll for the end of a header.
UNLOCKS_CHORD = "celery.chord_unlock"

#: Returns the result backend of a task; None when it has the one of its app.
own_backend = attrgetter("_backend")


@dataclass(slots=True, eq=False)
class LostRun:
    """A run whose process was lost, with the attributes of a running task.

    Attributes:
        name: the name of the task.
        request: the request of the run, as a running task has it.
        retry: the exception with which Celery reports the retry of the run; None when it sends none.
    """

    name: str
    request: Any
    retry: Any = None


_lost_run: ContextVar[LostRun | None] = ContextVar("dq_lost_run", default=None)


@contextmanager
def ending_lost_run(request: Any) -> Iterator[LostRun]:
    """Take the calls of the worker's main process for those of a run that ended without its process.

    Celery calls errbacks there. A call with the id of the run is its retry, which Celery sends since 5.7.

    Args:
        request: the worker's request of the run.
    """
    run = LostRun(request.task.name, request._context)

    def note(request: Any, reason: Any = None, **_: Any) -> None:
        if request is run.request:
            run.retry = reason

    token = _lost_run.set(run)
    signals.task_retry.connect(note)
    try:
        yield run
    finally:
        signals.task_retry.disconnect(note)
        _lost_run.reset(token)


def continued_run(task_id: Any) -> Any:
    """Return the run that a call with this id continues: a running task or a lost run; else None."""
    run = _lost_run.get() or (_stack.top if running_tasks else None)
    is_same = task_id is not None and run is not None and run.request.id == task_id
    return run if is_same else None


def calling_request() -> Any:
    """Return the request of the run that makes a call here; None outside of runs.

    A task that a run calls as a function, or applies eagerly, has no message. Its calls are those of the run.
    """
    for task in reversed(_stack.stack if running_tasks else ()):
        # A task that applies itself is on the stack twice, and has two requests.
        for request in reversed(task.request_stack.stack):
            if request.properties:
                return request
    lost = _lost_run.get()
    return None if lost is None else lost.request


def in_task() -> bool:
    """Whether a task makes the call: then the call is a child of that task."""
    # Looking at the storage is quicker than looking for the stack.
    return bool(running_tasks and _stack.stack)


def continues_run(options: Mapping[str, Any]) -> bool:
    """Whether a call is the continuation of a run that makes it, and not a call of the code of a task.

    Such a call is a step of a chain, a callback, the body of a chord, or the replacement of the task.

    Args:
        options: The options of the call.
    """
    if _publishes_callback is not None and _publishes_callback.get():
        return True
    # Before Celery 5.7, the first tasks of a body that is a chain or a group are not recognised.
    if options.get("parent_id"):
        return True  # Celery finds the parent of other calls by itself
    task_id = options.get("task_id")
    request = None if task_id is None else calling_request()
    if request is None:
        return False
    is_body = bool(request.chord) and request.chord["options"].get("task_id") == task_id
    return is_body or request.task == UNLOCKS_CHORD or continued_run(task_id) is not None


def current_app_if_any() -> Any:
    """Return the current or the default app; None if there is none. Creates no app."""
    return _celerys._tls.current_app or _celerys.default_app


def registered_tasks(app: Any) -> Any:
    """Return the tasks that are registered now, without finalizing the app."""
    return app._tasks


def task_named(app: Any, name: str) -> Any:
    """Return the task with a name; None when it is registered in other processes only."""
    # An app that must not finalize itself has only its registered tasks.
    return (app.tasks if app.finalized or app.autofinalize else app._tasks).get(name)


def arguments_of(message: Any) -> tuple[Any, Any, Any]:
    """Return the arguments of a message that Celery has made, and its callbacks."""
    body = message[2]
    if isinstance(body, dict):  # task protocol 1
        return body["args"], body["kwargs"], body
    args, kwargs, embed = body
    return args, kwargs, embed


def open_parts(app: Any) -> tuple[Any, Any, Any]:
    """Return the pools of connections and of producers and the backend, each None if it was not made."""
    return app._pool, app.amqp._producer_pool, app._backend


def names_of_setting(app: Any, name: str) -> tuple[str, ...]:
    """Return the names under which the setting may be written."""
    return tuple(app.conf._to_keys(name))


def options_of_plain_call(task: Any) -> dict[str, Any]:
    """Return the options with which Celery sends a call of the task without options."""
    options: dict[str, Any] = task._get_exec_options()
    return options


def option_method_is_celerys(kind: type, base: type) -> bool:
    """Whether the class computes the options of a call as Celery's `base` does."""
    return kind._get_exec_options is base._get_exec_options  # type: ignore[attr-defined]  # not in the stubs


def dumps_pydantic_arguments(task: Any) -> bool:
    """Whether the task converts its arguments from pydantic models. Only some versions of Celery can."""
    return getattr(task, "_dump_pydantic_arguments", None) is not None


def set_ignored(result: Any, ignored: Any) -> None:
    """Mark a result with the option ``ignore_result`` of its call."""
    result._ignored = ignored


def keep_meta(result: Any, meta: Any) -> None:
    """Give a result the state that the backend has stored for its task."""
    result._maybe_set_cache(meta)


def has_meta(result: Any) -> bool:
    """Whether a result has kept the state of a task that has ended."""
    return result._cache is not None
