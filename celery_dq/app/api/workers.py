"""``app.dq.workers``: the workers, and the partitions of each that shares them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.api.by_queue_name import QueuesApi
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.explain import Explanation
from celery_dq.inspector.queues import QueueSnapshot
from celery_dq.inspector.workers import WorkerSnapshot, sharing_workers, worker_of, workers_of
from celery_dq.singleton.elections import require_kazoo, zookeeper_session
from celery_dq.transport.redis.store.partition import Partition


class Workers:
    """Reads the workers from the leases, with ``dq_allocation`` also from ZooKeeper. Asks no worker."""

    def __init__(self, broker: BrokerAccess, queues: QueuesApi) -> None:
        self._broker = broker
        self._queues = queues

    @property
    def is_shared(self) -> bool:
        """Whether workers share partitions (``dq_allocation``)."""
        return self._broker.options.allocation.enabled

    def named_in(self, explanation: Explanation, partition: Partition) -> Explanation:
        """Return an explanation that also names the worker of the partition, if a message waits for one."""
        if explanation.reason not in ("turn", "no-worker", "behind"):
            return explanation
        name = f"{partition.keys.queue}/{partition.keys.partition}"
        worker = worker_of(name, self.sharing())
        if not worker:
            return explanation  # the queue is not allocated
        return replace(explanation, sentence=f"{explanation.sentence} Worker {worker} serves {name}.")

    def __call__(self) -> list[WorkerSnapshot]:
        """Read the workers that consume queues.

        Raises:
            InvalidRequest: The broker does not know its consumers.
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        if not self._broker.serves_queues():
            raise InvalidRequest(
                "This broker does not know its consumers: ask the workers with 'celery status'"
            )
        return self.among(self._queues.snapshots(ages=False))

    def among(self, queues: Iterable[Any]) -> list[WorkerSnapshot]:
        """Return the consumers of queues by their snapshots, and the workers that share partitions."""
        return workers_of((each for each in queues if isinstance(each, QueueSnapshot)), self.sharing())

    def sharing(self) -> list[WorkerSnapshot]:
        """Read the workers that share partitions; none without ``dq_allocation``.

        Raises:
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        if not self.is_shared:
            return []
        require_kazoo(self._broker.options)
        session: Any = zookeeper_session(self._broker.options)
        with closing(session):
            return sharing_workers(session, self._broker.options.environment)
