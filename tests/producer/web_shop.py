"""A WSGI application that calls tasks, for the tests under real web servers.

Environment: BROKER, SPILL (the folder), QUEUE. With EARLY the master calls a task too, before it forks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from celery import Celery

import celery_dq

app: Any = Celery("shop", broker=os.environ["BROKER"], set_as_current=False)
app.conf.update(
    dq_buffer=True,
    dq_buffer_folder=os.environ["SPILL"],
    # No message is sent before a flush or the end of the process.
    dq_buffer_linger=os.environ.get("LINGER", "1ms"),
    dq_buffer_close_timeout="20s",
    task_routes={"job": os.environ["QUEUE"]},
)
celery_dq.setup(app)


def job(name: str) -> None: ...


task: Any = app.task(name="job", shared=False)(job)


def call(name: str) -> None:
    task.apply_async((name,), task_id=name)


if os.environ.get("EARLY"):
    call("master")


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """``/<name>`` calls a task with that id; the answer is the process's id."""
    name = environ["PATH_INFO"].strip("/")
    if name:
        call(name)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]
