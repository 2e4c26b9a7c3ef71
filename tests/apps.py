"""Apps with celery-dq: their types, their tasks, and their commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_dq.app.api.api import DQ
from celery_dq.cli import dq


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


def run_dq(app: Any, *words: str, status: int = 0, **options: Any) -> str:
    """Run ``celery dq`` with these words; return its output."""
    context = CLIContext(app=app, no_color=True, workdir=None)
    result = CliRunner().invoke(dq, list(words), obj=context, **options)
    assert result.exit_code == status, result.output
    return result.output
