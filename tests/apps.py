"""What Celery's types do not say of an app that celery-dq is set up on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_dq.app.face import DQ


class DQCelery(Celery):
    """The type of an app after ``celery_dq.setup``; none is made of it."""

    dq: DQ


def task(app: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``app.task`` with options that Celery does not know, as calls of the task have; for this app only."""
    make: Callable[[Callable[..., Any]], Any] = app.task(shared=False, **options)
    return make
