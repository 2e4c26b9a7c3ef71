"""``app.dq.workers``: the workers that share partitions, and the partitions of each."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.errors import ConfigurationError
from celery_dq.inspector.explain import Explanation
from celery_dq.inspector.workers import WorkerSnapshot, worker_of, worker_snapshots
from celery_dq.singleton.elections import require_kazoo, zookeeper_session
from celery_dq.transport.redis.store.partition import Partition


class Workers:
    """Reads the workers from the ZooKeeper of ``dq_election``. Asks no worker."""

    def __init__(self, broker: BrokerAccess) -> None:
        self._broker = broker

    @property
    def is_enabled(self) -> bool:
        """Whether workers share partitions (``dq_allocation``)."""
        return self._broker.options.allocation.enabled

    def named_in(self, explanation: Explanation, partition: Partition) -> Explanation:
        """Return an explanation that also names the worker of the partition, if a message waits for one."""
        if not self.is_enabled or explanation.reason not in ("turn", "no-worker", "behind"):
            return explanation
        name = f"{partition.keys.queue}/{partition.keys.partition}"
        worker = worker_of(name, self())
        if not worker:
            return explanation  # the queue is not allocated
        return replace(explanation, sentence=f"{explanation.sentence} Worker {worker} serves {name}.")

    def __call__(self) -> list[WorkerSnapshot]:
        """Read the workers.

        Raises:
            ConfigurationError: ``dq_allocation`` is off, so that each worker serves all that it consumes.
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        if not self.is_enabled:
            raise ConfigurationError(
                "dq_allocation is off, so that each worker serves all partitions of its queues: "
                "'celery dq queues' shows their consumers"
            )
        require_kazoo(self._broker.options)
        session: Any = zookeeper_session(self._broker.options)
        with closing(session):
            return worker_snapshots(session, self._broker.options.environment)
