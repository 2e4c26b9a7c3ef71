"""The boot step for the ZooKeeper broker: it distinguishes a crash from a requeue, and fails dead letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import bootsteps

from celery_dq.compat.pool_flush import guard_flush
from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.transport.aliases import ZOOKEEPER_SCHEME
from celery_dq.transport.stored_message import StoredMessage
from celery_dq.worker.failed_tasks import fail_task, is_crash


class ZooKeeperStep(bootsteps.StartStopStep):
    """Connects Celery's consumer with the ZooKeeper broker. Does nothing for other brokers."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        context = consumer.conninfo.transport_options.get(APP_CONTEXT)
        self._is_its_broker = (
            isinstance(context, AppContext) and consumer.conninfo.transport_cls == ZOOKEEPER_SCHEME
        )
        if isinstance(context, AppContext) and self._is_its_broker:
            context.discard_handler = ZooKeeperDiscardHandler(consumer)
            consumer.pool.apply_async = noting_crashes(consumer.pool.apply_async)

    def start(self, consumer: Any) -> None:
        """Guard the flush of the pool, which runs now and has its own methods in place."""
        if self._is_its_broker:
            guard_flush(consumer.pool, _ignore_events)


class ZooKeeperDiscardHandler:
    """The worker's side of :class:`celery_dq.protocols.DiscardHandler`.

    Args:
        consumer: Celery's consumer.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def deliver_discard(self, message: Any, reason: str) -> bool:
        """Fail the task of a dead letter."""
        task_id, name = message.headers.get("id"), message.headers.get("task")
        if not (isinstance(task_id, str) and isinstance(name, str) and name in self._consumer.app.tasks):
            return False
        # The callback of kombu's consumer would set it, but a discard does not pass that callback.
        message.accept = self._consumer.task_consumer.accept
        fail_task(self._consumer, message, name, reason.partition(":")[2])
        return True


def _ignore_events(kept: frozenset[int]) -> None:
    """Do nothing: the broker delivers a job that was not begun again."""


def noting_crashes(apply_async: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a pool's ``apply_async``, to mark the message of a task whose process was lost."""

    def applied(target: Any, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        request = getattr(options.get("callback"), "__self__", None)
        message, on_error = getattr(request, "message", None), options.get("error_callback")
        if isinstance(message, StoredMessage):
            message.pass_eta_to(request)
        if message is not None and on_error is not None:

            def error(exc_info: Any, *more: Any, **named: Any) -> Any:
                message.crashed = is_crash(exc_info)
                return on_error(exc_info, *more, **named)

            options["error_callback"] = error
        return apply_async(target, args, kwargs, **options)

    return applied
