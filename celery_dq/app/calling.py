"""``app.send_task``, to which every ``apply_async`` and ``delay`` comes down: through the buffer, or not.

A call is buffered when it says so (``buffered=True``), or a ``with app.dq.buffer.buffered()`` around it does,
or its task (``@app.task(buffered=True)``), or else the setting ``dq_buffer``. Never are calls with a producer
or connection of the caller's (beat and groups pass one), calls with ``retry=False`` (they want to know at
once), and, unless asked for, what a task publishes: its own message would be acknowledged first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from celery_dq.app.face import dq_of
from celery_dq.producer.sender import Sender
from celery_dq.producer.stand_in import StandIn

__all__ = ["BufferedCalls", "buffer_calls"]

_OWN_WAY = ("producer", "publisher", "connection")


class BufferedCalls:
    """Stands in for the app's ``send_task``.

    :param app: a Celery app.
    :param send_task: its own.
    """

    def __init__(self, app: Any, send_task: Callable[..., Any]) -> None:
        self._app = app
        self._send_task = send_task
        self._stand_in = StandIn(self._accept)
        self._sender: Sender | None = None

    def __call__(self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send a task by name; see Celery's ``send_task``, and the module for ``buffered``."""
        asked = options.pop("buffered", None)
        if more or not self._wanted(asked, name, options):
            return self._send_task(name, args, kwargs, *more, **options)
        self._prepare()
        options["producer"] = self._stand_in
        return self._send_task(name, args, kwargs, **options)

    # -- whether

    def _wanted(self, asked: bool | None, name: str, options: dict[str, Any]) -> bool:
        for own_way in _OWN_WAY:
            if options.get(own_way) is not None:
                return False
        if asked is not None:
            return bool(asked) and self._possible(options)
        buffer = dq_of(self._app).buffer
        wanted = buffer.wanted
        if wanted is None:
            task = options.get("task_type") or self._app._tasks.get(name)
            wanted = getattr(task, "buffered", None)
        if wanted is None:
            wanted = buffer.options.enabled
        if not wanted or options.get("retry") is False:
            return False
        in_worker = self._app.loader.worker_initialized or self._app.current_worker_task is not None
        return (buffer.options.in_workers or not in_worker) and self._possible(options)

    def _possible(self, options: dict[str, Any]) -> bool:
        if not options.get("ignore_result") and hasattr(self._app.backend, "binding"):
            # The rpc backend declares its reply queue before each message, on the message's channel.
            return False
        uwsgi = sys.modules.get("uwsgi")
        # Without that option no thread of a uWSGI process ever runs.
        return uwsgi is None or "enable-threads" in uwsgi.opt or "threads" in uwsgi.opt

    # -- how

    def _prepare(self) -> None:
        app = self._app
        backend = app.backend
        if "on_task_call" not in backend.__dict__:
            backend.on_task_call = _UnlessBuffered(backend.on_task_call)
        result_class = app.AsyncResult
        if not issubclass(result_class, HurryingResult):
            app.__dict__["AsyncResult"] = type(
                result_class.__name__,
                (HurryingResult, result_class),
                {"__module__": result_class.__module__, "__doc__": result_class.__doc__},
            )

    def _accept(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> None:
        sender = self._sender
        if sender is None:
            sender = self._sender = dq_of(self._app).make_sender(self._app)
        dq_of(self._app).buffer.producer.put(sender.address(message, exchange, routing_key, declare))


class _UnlessBuffered:
    """A backend's ``on_task_call``: subscribing to the result can wait until somebody asks for it.

    It needs a server, and a buffered call needs none. Celery subscribes anyway when a result is waited for.
    """

    def __init__(self, on_task_call: Callable[..., Any]) -> None:
        self._on_task_call = on_task_call

    def __call__(self, producer: Any, task_id: str) -> Any:
        return None if isinstance(producer, StandIn) else self._on_task_call(producer, task_id)


class HurryingResult:
    """Mixed over the app's ``AsyncResult``: who waits for a task does not want it to linger."""

    app: Any

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the result; see Celery's ``AsyncResult.get``."""
        dq_of(self.app).buffer.hurry()
        return super().get(*args, **kwargs)  # type: ignore[misc]  # of Celery's AsyncResult

    wait = get  # Celery's old name for it


def buffer_calls(app: Any) -> None:
    """Put :class:`BufferedCalls` before the app's ``send_task``. Idempotent."""
    if not isinstance(app.send_task, BufferedCalls):
        app.send_task = BufferedCalls(app, app.send_task)
