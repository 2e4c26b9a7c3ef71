"""The boot step for the ZooKeeper broker: it distinguishes a crash from a requeue, and fails dead letters."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from celery_dq.context import AppContext
from celery_dq.transport.aliases import ZOOKEEPER_SCHEME
from celery_dq.transport.stored_message import StoredMessage
from celery_dq.worker.discards import fail_task
from celery_dq.worker.task_events import TaskSubscriber, task_events


class ZooKeeperStep(bootsteps.Step):
    """Connects Celery's consumer with the ZooKeeper broker. Does nothing for other brokers."""

    requires = ("celery_dq.worker.task_events:TaskEventsStep",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        context = AppContext.of(consumer.conninfo)
        if context is not None and consumer.conninfo.transport_cls == ZOOKEEPER_SCHEME:
            context.discard_handler = ZooKeeperDiscardHandler(consumer)
            task_events(consumer).subscribe(CrashMarks())


class CrashMarks(TaskSubscriber):
    """Marks the message of a task whose process was lost."""

    role = "zookeeper"

    def follows(self, request: Any) -> bool:
        """See :class:`TaskSubscriber`."""
        return isinstance(request.message, StoredMessage)

    def offered(self, request: Any) -> None:
        """See :class:`TaskSubscriber`."""
        request.message.pass_eta_to(request)

    def ending(self, request: Any, info: Any, crashed: bool) -> None:
        """Let a requeue count as a lost consumer."""
        request.message.crashed = crashed


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
