"""``app.dq.queues`` and ``app.dq.dead_letters``: by the name of a queue, in the broker that the app uses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.api.queues import QueueApi
from celery_dq.app.api.redis_dead_letters import DeadLetters
from celery_dq.inspector.queues import QueueSnapshot, ZooKeeperQueueSnapshot, queue_snapshots
from celery_dq.inspector.redis_values import check_text
from celery_dq.transport.redis.store.rounds import AT_ONCE

T = TypeVar("T")


class ByQueueName(Mapping[str, T]):
    """Something of each queue. Every name is valid: a queue comes into existence with its first message."""

    def __init__(self, broker: BrokerAccess) -> None:
        self._broker = broker

    def __getitem__(self, name: str) -> T:
        check_text("queue", name)
        return self._of(name)

    @abstractmethod
    def _of(self, name: str) -> T:
        """Return the object of a queue."""

    def _names(self) -> list[str]:
        return self._broker.queue_names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, name: Any) -> bool:
        return name in self._names()


class QueuesApi(ByQueueName[QueueApi]):
    """The queues by name."""

    def _of(self, name: str) -> QueueApi:
        if self._broker.is_zookeeper():
            # The import needs kazoo, an extra that a user of Redis may not have installed.
            from celery_dq.app.api.zookeeper_queues import ZooKeeperQueueApi

            return ZooKeeperQueueApi(self._broker, name)
        return QueueApi(self._broker, name)

    def snapshots(self, *names: str, ages: bool = True) -> Iterator[QueueSnapshot | ZooKeeperQueueSnapshot]:
        """Yield the states of queues, which share round trips.

        Args:
            names: The names of the queues; default: all of them.
            ages: Whether to look for the oldest waiting message of each queue.
        """
        chosen = names or tuple(self)
        if self._broker.is_zookeeper():
            yield from (self[name].snapshot() for name in chosen)
            return
        for start in range(0, len(chosen), AT_ONCE):
            with self._broker.open_all(chosen[start : start + AT_ONCE]) as opened:
                partitions = [each.partitions for each in opened]
                found = queue_snapshots(partitions, opened[0].client, ages=ages)
            yield from found


class DeadLettersApi(ByQueueName[DeadLetters]):
    """The dead letters by queue."""

    def _of(self, name: str) -> DeadLetters:
        if self._broker.is_zookeeper():
            # See above.
            from celery_dq.app.api.zookeeper_queues import ZooKeeperDeadLettersApi

            return ZooKeeperDeadLettersApi(self._broker, name)
        return DeadLetters(self._broker, name)
