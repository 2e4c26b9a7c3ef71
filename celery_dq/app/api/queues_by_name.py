"""``app.dq.queues``: the queues by name, in the broker that the app uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.api.queues import QueueApi
from celery_dq.context import AppContext
from celery_dq.inspector.redis_values import check_text


class QueuesApi(Mapping[str, QueueApi]):
    """The queues by name. Every name is valid: a queue comes into existence with its first message."""

    def __init__(self, broker: BrokerAccess, context: AppContext) -> None:
        self._broker = broker
        self._context = context

    def __getitem__(self, name: str) -> QueueApi:
        check_text("queue", name)
        if self._broker.is_zookeeper():
            # The import needs kazoo, an extra that a user of Redis may not have installed.
            from celery_dq.app.api.zookeeper_queues import ZooKeeperQueueApi

            return ZooKeeperQueueApi(self._broker, self._context, name)
        return QueueApi(self._broker, self._context, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._broker.queue_names())

    def __len__(self) -> int:
        return len(self._broker.queue_names())

    def __contains__(self, name: Any) -> bool:
        return name in self._broker.queue_names()
