"""What a worker does for the ZooKeeper broker: tells a crash from a requeue, records what was given up on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import bootsteps

from celery_dq.hooks import WIRES, Wires
from celery_dq.transport.aliases import ZOOKEEPER_SCHEME
from celery_dq.worker.burial import fail, is_crash
from celery_dq.worker.pool_flush import guard_flush


class ZooKeeperStep(bootsteps.StartStopStep):
    """Connects Celery's consumer with the ZooKeeper broker. Does nothing for other brokers."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        wires = consumer.conninfo.transport_options.get(WIRES)
        self._is_its_broker = isinstance(wires, Wires) and consumer.conninfo.transport_cls == ZOOKEEPER_SCHEME
        if isinstance(wires, Wires) and self._is_its_broker:
            wires.undertaker = Bookkeeper(consumer)
            consumer.pool.apply_async = noting_crashes(consumer.pool.apply_async)

    def start(self, consumer: Any) -> None:
        """The pool runs by now, and has its own methods in place."""
        if self._is_its_broker:
            guard_flush(consumer.pool, _tell_nobody)


class Bookkeeper:
    """The worker's side of :class:`celery_dq.hooks.Undertaker`.

    Arguments:
        consumer: Celery's.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def deliver_discard(self, message: Any, reason: str) -> bool:
        """Fail the task of a dead letter."""
        task_id, name = message.headers.get("id"), message.headers.get("task")
        if not (isinstance(task_id, str) and isinstance(name, str) and name in self._consumer.app.tasks):
            return False
        fail(self._consumer, message, name, reason.partition(":")[2])
        return True


def _tell_nobody(kept: frozenset[int]) -> None:
    """What was not begun comes anew from the broker."""


def noting_crashes(apply_async: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pool's ``apply_async`` that marks the message of a task whose process was lost."""

    def applied(target: Any, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        request = getattr(options.get("callback"), "__self__", None)
        message, tell = getattr(request, "message", None), options.get("error_callback")
        if message is not None and tell is not None:

            def error(info: Any, **more: Any) -> Any:
                message.crashed = is_crash(info)
                return tell(info, **more)

            options["error_callback"] = error
        return apply_async(target, args, kwargs, **options)

    return applied
