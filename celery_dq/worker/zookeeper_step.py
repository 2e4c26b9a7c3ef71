"""The boot step for the ZooKeeper broker: it distinguishes a crash from a requeue, and fails dead letters."""

from __future__ import annotations

from typing import Any

from celery_dq.context import AppContext
from celery_dq.transport.aliases import ZOOKEEPER_SCHEME
from celery_dq.transport.in_flight import StoredMessage
from celery_dq.worker.bootsteps import ContextStep
from celery_dq.worker.discards import Discards
from celery_dq.worker.task_events import TaskSubscriber, task_events


class ZooKeeperStep(ContextStep):
    """Connects Celery's consumer with the ZooKeeper broker. Does nothing for other brokers."""

    requires = ("celery_dq.worker.task_events:TaskEventsStep",)

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Follow the tasks, on the ZooKeeper broker."""
        if consumer.conninfo.transport_cls != ZOOKEEPER_SCHEME:
            return False
        context.discard_handler = Discards(consumer)
        task_events(consumer).subscribe(CrashMarks())
        return True


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
