"""The boot step that makes a worker share the partitions of its queues with other workers."""

from __future__ import annotations

from typing import Any

from celery_dq.context import AppContext
from celery_dq.errors import ConfigurationError
from celery_dq.options.sections import Options
from celery_dq.singleton.elections import require_kazoo, zookeeper_session
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.transport.in_flight import TRUSTED_SHARE
from celery_dq.worker import commands
from celery_dq.worker.bootsteps import ContextStep
from celery_dq.worker.singleton import singleton_queues

#: Importing the module registers these commands.
COMMANDS = (commands.allocation, commands.drain)

#: Seconds that a stopping worker waits for ZooKeeper.
CLOSE_TIMEOUT_S = 5.0
#: Seconds by which a ZooKeeper that does not answer may delay the end of the consumption.
LEAVE_TIMEOUT_S = 1.0


class AllocationStep(ContextStep):
    """Registers the worker, follows the assignment, and takes part in the election of the allocator.

    ``start`` runs at every reconnect, which does not end the registration. ``close`` runs when the worker
    begins to stop: it leaves before its pool is drained, so that other workers get its partitions at once.
    """

    requires = ("celery_dq.worker.bootsteps:ConsumerStep",)

    def prepare(self, consumer: Any, context: AppContext) -> bool:
        """Make the worker a member, if the settings say so."""
        options: Options = context.options
        if not options.allocation.enabled:
            return False
        if consumer.conninfo.transport_cls not in TENANT_SCHEMES:
            raise ConfigurationError(
                "dq_allocation = True needs a broker with partitions, such as dq-redis://: leave it out, or "
                f"change broker_url ({consumer.conninfo.transport_cls}://)"
            )
        require_kazoo(options)
        # kazoo is imported only by a worker that needs it.
        from celery_dq.allocation.follower import Follower
        from celery_dq.allocation.rebalancer import allocator
        from celery_dq.znodes import AllocationNodes

        singletons = singleton_queues(consumer.app, options)

        def is_allocated(queue: str, count: int) -> bool:
            consumed = queue in consumer.app.amqp.queues.consume_from and queue not in singletons
            return consumed and options.is_allocated(queue, count)

        self._session = zookeeper_session(options)
        self._follower = context.allocation = Follower(
            self._session,
            AllocationNodes(options.environment),
            consumer.hostname,
            is_allocated=is_allocated,
            # Until then the heartbeat may be answered in time for the lease.
            silence_s=max(options.election_session_us, TRUSTED_SHARE * options.lease_us) / 1e6,
        )
        self._allocator = allocator(
            self._session,
            options.environment,
            consumer.hostname,
            options.allocation.join_delay_us / 1e6,
        )
        return True

    def start(self, consumer: Any) -> None:
        """Register, and become a candidate for the allocator."""
        self._follower.open()
        self._allocator.open()

    def close(self, consumer: Any) -> None:
        """Leave: the worker stops."""
        self._follower.close(LEAVE_TIMEOUT_S)

    def shutdown(self, consumer: Any) -> None:
        """Withdraw the candidacy, and end the session."""
        self._follower.close(CLOSE_TIMEOUT_S)
        self._allocator.close(CLOSE_TIMEOUT_S)
        self._session.close()
