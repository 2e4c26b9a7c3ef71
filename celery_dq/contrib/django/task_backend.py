"""The backend of ``django.tasks``: each task of Django is a task of Celery with the path of its function.

A task is registered in Celery when its module is imported, so ``app.autodiscover_tasks()`` finds it in the
``tasks`` modules of the installed apps. ``django.tasks`` is part of Django 6; the package django-tasks brings
it to older ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone as zones
from importlib import import_module
from inspect import Parameter, Signature, signature
from traceback import format_exception
from types import SimpleNamespace
from typing import Any

import django
from celery import shared_task
from celery.backends.base import DisabledBackend
from django.core import checks
from django.utils import timezone

from celery_dq.app.api.api import dq_of
from celery_dq.contrib.django.apps import project_app
from celery_dq.contrib.django.task_tenant import TENANT
from celery_dq.errors import ConfigurationError


def _load() -> SimpleNamespace:
    """Return the parts of ``django.tasks``, or of the package django-tasks.

    Raises:
        ConfigurationError: There is neither.
    """
    name = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
    try:
        base, exceptions = import_module(f"{name}.base"), import_module(f"{name}.exceptions")
        signals, backends = import_module(f"{name}.signals"), import_module(f"{name}.backends.base")
    except ImportError as exc:
        raise ConfigurationError(
            f"DqBackend needs django.tasks ({exc}): install django-tasks, or Django 6"
        ) from exc
    # The package named it otherwise at first.
    names = ("TaskResultDoesNotExist", "ResultDoesNotExist")
    missing = next(getattr(exceptions, each) for each in names if hasattr(exceptions, each))
    utils = import_module("django.utils.json" if django.VERSION >= (6, 0) else f"{name}.utils")
    return SimpleNamespace(
        base=base,
        signals=signals,
        Backend=backends.BaseTaskBackend,
        DoesNotExist=missing,
        normalize_json=utils.normalize_json,
    )


UTC = zones.utc
#: The attribute of a function with the name by which it is registered in Celery.
REGISTERED = "dq_registered"
#: Seconds in which a task has a result that the broker has as settled, without its name: it has just begun or
#: ended.
START_S, LOOK_AGAIN_S = 1.0, 0.01
#: The times of a result that Celery does not keep. The first is a header of the message. A run adds the
#: others, and makes stamps of all of them, because Celery stores these with the result.
TIMES = {
    "enqueued_at": "dq_enqueued_at",
    "started_at": "dq_started_at",
    "last_attempted_at": "dq_attempted_at",
}
_TASKS: Any = _load()
_READY, _RUNNING, _FAILED, _SUCCESSFUL = (
    _TASKS.base.TaskResultStatus[name] for name in ("READY", "RUNNING", "FAILED", "SUCCESSFUL")
)
#: The state of a task in Celery's result backend -> its status in Django.
_STATUS = {
    "STARTED": _RUNNING,
    "SUCCESS": _SUCCESSFUL,
    "FAILURE": _FAILED,
    "REVOKED": _FAILED,
    "REJECTED": _FAILED,
    "RETRY": _READY,
}


def _status_of(meta: Mapping[str, Any]) -> Any:
    """Return the status of a task; None if the result backend does not know it."""
    state = meta["status"]
    # Any other state is one that the task has given itself, by `update_state`.
    return None if state == "PENDING" else _STATUS.get(state, _RUNNING)


def celery_priority(priority: int) -> int:
    """Return the priority of the broker, 0 to 9, for one of Django's, -100 to 100; 0 is 4."""
    return (priority + 100) * 10 // 201


class DqBackend(_TASKS.Backend):  # type: ignore[misc]  # its module depends on the version of Django
    """Publishes the tasks of Django to the Celery app of the project.

    The queue ``default`` is the one that the app's routes choose; any other name is the name of a queue.
    Results need a result backend of Celery, and ``CELERY_RESULT_EXTENDED = True``.
    """

    supports_defer = True
    supports_async_task = True
    supports_priority = True

    @property
    def supports_get_result(self) -> bool:
        """Whether Celery keeps results with the names of their tasks."""
        app = project_app()
        return not isinstance(app.backend, DisabledBackend) and bool(app.conf.result_extended)

    def validate_task(self, task: Any) -> None:
        """Check a task, and register it in Celery."""
        super().validate_task(task)
        self._register(task)

    def _register(self, task: Any) -> None:
        # Celery keeps each registration, and Django validates a task at every call. The variants of a task,
        # by `using` or of another backend, have the same function.
        if getattr(task.func, REGISTERED, "") == task.module_path:
            return
        setattr(task.func, REGISTERED, task.module_path)
        # Of a task that runs, the broker has no name after an early ack.
        options: dict[str, Any] = {"track_started": True}
        if name := getattr(task.func, TENANT, None):
            options["tenant"] = name
        backend = self

        def run(bound: Any, /, *args: Any, **kwargs: Any) -> Any:
            return backend.run(task, bound.request, args, kwargs)

        run.__module__, run.__qualname__, run.__doc__ = task.func.__module__, task.name, task.func.__doc__
        # Celery checks calls against it, and the tenant is an argument of it. `bound` takes the place of the
        # context.
        own = [*signature(task.func).parameters.values()][int(task.takes_context) :]
        bound = Parameter("bound", Parameter.POSITIONAL_ONLY)
        run.__signature__ = Signature([bound, *own])  # type: ignore[attr-defined]  # as inspect reads it
        make: Any = shared_task
        make(name=task.module_path, bind=True, **options)(run)

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Publish a task, and return its result, which is not there yet."""
        self.validate_task(task)
        result = self._result(task, "", args=args, kwargs=kwargs)
        now = timezone.now()
        options: dict[str, Any] = {"priority": celery_priority(task.priority)}
        options["headers"] = {TIMES["enqueued_at"]: now.astimezone(UTC).isoformat()}
        if task.queue_name != _TASKS.base.DEFAULT_TASK_QUEUE_NAME:
            options["queue"] = task.queue_name
        if task.run_after is not None:
            after = task.run_after
            options["eta"] = after if timezone.is_aware(after) else timezone.make_aware(after)
        app = project_app()
        sent = app.tasks[task.module_path].apply_async(result.args, result.kwargs, **options)
        _set(result, id=sent.id, enqueued_at=now)
        _TASKS.signals.task_enqueued.send(type(self), task_result=result)
        return result

    def run(self, task: Any, request: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a task in a worker, and return its value for Celery's result backend."""
        now = timezone.now()
        workers = [request.hostname or ""] * (request.retries + 1)
        times = _stamp_times(request, now)
        result = self._result(
            task, request.id, status=_RUNNING, args=args, kwargs=kwargs, worker_ids=workers, **times
        )
        _TASKS.signals.task_started.send(sender=type(self), task_result=result)
        first = (_TASKS.base.TaskContext(task_result=result),) if task.takes_context else ()
        try:
            value = _TASKS.normalize_json(task.call(*first, *args, **kwargs))
        except Exception as exc:
            _set(result, status=_FAILED, finished_at=timezone.now())
            result.errors.append(_error(exc, ""))
            _TASKS.signals.task_finished.send(type(self), task_result=result)
            raise
        _set(result, status=_SUCCESSFUL, finished_at=timezone.now(), _return_value=value)
        _TASKS.signals.task_finished.send(type(self), task_result=result)
        return value

    def get_result(self, result_id: str) -> Any:
        """Return the result of a task, from Celery's result backend, or from the queue while it waits.

        Raises:
            NotImplementedError: Celery keeps no results, or without the names of their tasks.
            TaskResultDoesNotExist: No task has the id, or its result is deleted.
        """
        if not self.supports_get_result:
            raise NotImplementedError(_NEEDS_RESULTS)
        app = project_app()
        until, is_found = time.monotonic() + START_S, True
        while (status := _status_of(meta := app.backend.get_task_meta(result_id))) is None and is_found:
            found = next(iter(dq_of(app).find(result_id)), None)
            if found is not None and found.task:
                return self._waiting(app, found, result_id)
            # The task may have begun or ended between the two answers.
            is_found = found is not None and time.monotonic() < until
            if is_found:
                time.sleep(LOOK_AGAIN_S)
        if status is None:
            raise _TASKS.DoesNotExist(result_id)
        task = self._task(meta.get("name") or "", result_id)
        result = self._result(
            task,
            result_id,
            status=status,
            args=meta.get("args") or (),
            kwargs=meta.get("kwargs") or {},
            worker_ids=[meta["worker"]] * ((meta.get("retries") or 0) + 1) if meta.get("worker") else [],
            **_times(meta),
        )
        if result.is_finished:
            _set(result, finished_at=_time(meta.get("date_done")))
        if status is _SUCCESSFUL:
            _set(result, _return_value=meta["result"])
        elif status is _FAILED and isinstance(meta["result"], BaseException):
            result.errors.append(_error(meta["result"], meta.get("traceback") or ""))
        return result

    def _waiting(self, app: Any, found: Any, result_id: str) -> Any:
        """Return the result of a task that the broker has. Its arguments are not known there."""
        status = _RUNNING if found.state in ("claimed", "settled") else _READY
        details = dq_of(app).queues[found.queue].details(result_id)
        times = _times({} if details is None else details.headers)
        return self._result(self._task(found.task, result_id), result_id, status=status, **times)

    def _task(self, name: str, result_id: str) -> Any:
        """Return the task of Django with the name of a Celery task."""
        module, _, function = name.rpartition(".")
        try:
            task = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError):
            task = None
        if not isinstance(task, _TASKS.base.Task):
            raise _TASKS.DoesNotExist(result_id)
        return task

    def _result(self, task: Any, result_id: str, **parts: Any) -> Any:
        known = {
            "status": _READY,
            "enqueued_at": None,
            "started_at": None,
            "finished_at": None,
            "last_attempted_at": None,
            "args": (),
            "kwargs": {},
            "errors": [],
            "worker_ids": [],
        }
        return _TASKS.base.TaskResult(task=task, id=result_id, backend=self.alias, **{**known, **parts})

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Say that results cannot be read, if Celery has a result backend that lacks their names."""
        app = project_app()
        if isinstance(app.backend, DisabledBackend) or app.conf.result_extended:
            return []
        return [checks.Warning(f"TASKS[{self.alias!r}]: {_NEEDS_RESULTS}", id="celery_dq.W101")]


_NEEDS_RESULTS = "get_result needs a result backend of Celery, and CELERY_RESULT_EXTENDED = True"


def _set(result: Any, **parts: Any) -> None:
    # The results of Django are frozen for their users.
    for name, value in parts.items():
        object.__setattr__(result, name, value)


def _times(headers: Mapping[str, Any]) -> dict[str, datetime | None]:
    return {part: _time(headers.get(header)) for part, header in TIMES.items()}


def _stamp_times(request: Any, now: datetime) -> dict[str, datetime | None]:
    """Add the times of a run to its request, so that its result has them; return all of them."""
    stamps = dict(request.stamps or {})
    enqueued, started, attempted = TIMES.values()
    stamps.setdefault(enqueued, request.get(enqueued))
    stamps.setdefault(started, now.astimezone(UTC).isoformat())
    stamps[attempted] = now.astimezone(UTC).isoformat()
    request.stamps = stamps
    request.stamped_headers = list({*(request.stamped_headers or ()), *TIMES.values()})
    return _times(stamps)


def _error(exc: BaseException, traceback: str) -> Any:
    kind = type(exc)
    path = f"{kind.__module__}.{kind.__qualname__}"
    return _TASKS.base.TaskError(
        exception_class_path=path, traceback=traceback or "".join(format_exception(exc))
    )


def _time(done: datetime | str | None) -> datetime | None:
    """Return the end of a task, in UTC; some of Celery's backends keep it as text, some without a zone."""
    at = datetime.fromisoformat(done) if isinstance(done, str) else done
    if at is None:
        return None
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
