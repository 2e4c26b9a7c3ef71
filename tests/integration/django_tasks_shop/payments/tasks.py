"""Tasks of Django, by Django 6 or by the package django-tasks."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import django
from celery import current_task

from celery_dq.contrib.django.tasks import tenant

task: Any = import_module("django.tasks" if django.VERSION >= (6, 0) else "django_tasks").task


@task(priority=50)  # type: ignore[untyped-decorator]  # of one of two packages
@tenant("{merchant}")
def pay(merchant: str, amount: int = 1) -> dict[str, Any]:
    """Pay an amount."""
    return {"merchant": merchant, "amount": amount}


@task(takes_context=True, queue_name="reports")  # type: ignore[untyped-decorator]  # of one of two packages
def report(context: Any, name: str) -> list[Any]:
    """Return the parts of the context."""
    return [name, context.attempt, context.task_result.id]


@task  # type: ignore[untyped-decorator]  # of one of two packages
async def fail(reason: str) -> None:
    """Raise an error, in a coroutine."""
    raise LookupError(reason)


@task  # type: ignore[untyped-decorator]  # of one of two packages
def wait_for(path: str, state: str = "") -> None:
    """Run until the file is there; in a state of its own, if one is named."""
    if state:
        current_task.update_state(state=state)
    end = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < end:
        time.sleep(0.01)
