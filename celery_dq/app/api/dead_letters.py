"""``app.dq.dead_letters``: the dead letters of each queue, in the broker that the app uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.api.redis_dead_letters import DeadLetters
from celery_dq.context import AppContext
from celery_dq.inspector.redis_values import check_text


class DeadLettersApi(Mapping[str, DeadLetters]):
    """The dead letters by queue."""

    def __init__(self, broker: BrokerAccess, context: AppContext) -> None:
        self._broker = broker
        self._context = context

    def __getitem__(self, name: str) -> DeadLetters:
        check_text("queue", name)
        if self._broker.is_zookeeper():
            # The import needs kazoo, an extra that a user of Redis may not have installed.
            from celery_dq.app.api.zookeeper_dead_letters import ZooKeeperDeadLettersApi

            return ZooKeeperDeadLettersApi(self._broker, self._context, name)
        return DeadLetters(self._broker, self._context, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._broker.queue_names())

    def __len__(self) -> int:
        return len(self._broker.queue_names())
