"""Apps with celery-dq: their types and their tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer

from celery_dq.app.api.api import DQ


class DQCelery(Celery):
    """The type of an app after ``celery_dq.setup``; none is made of it."""

    dq: DQ


def without_shared_tasks(app: Any) -> Any:
    """Take the tasks away that other tests share with every app of the process."""
    for name in [name for name in app.tasks if not name.startswith("celery.")]:
        app.tasks.unregister(name)
    return app


def task(app: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``app.task`` with options that Celery does not know, as calls of the task have; for this app only."""
    make: Callable[[Callable[..., Any]], Any] = app.task(shared=False, **options)
    return make


def run_task(task: Any) -> None:
    """Run a task without arguments in this process, as a worker runs a message of it."""
    request = {"id": "run", "properties": {"correlation_id": "run"}, "delivery_info": {}}
    traced = build_tracer(task.name, task, app=task.app)("run", [], {}, request)
    assert traced.info is None, traced.info
