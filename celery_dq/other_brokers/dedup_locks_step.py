"""The boot step for dedup in a worker whose broker gives no verdicts."""

from __future__ import annotations

import os
import uuid
from typing import Any

from celery import bootsteps

from celery_dq.clock import SystemClock
from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.dedup.coordinator import Coordinator
from celery_dq.dedup.local import LocalCoordinator
from celery_dq.dedup.rule import rule_of
from celery_dq.errors import ConfigurationError
from celery_dq.other_brokers.dedup_locks import WorkerDedupLocks
from celery_dq.other_brokers.dedup_requests import WorkerDedupRequests
from celery_dq.other_brokers.lock_heartbeat import DedupLockHeartbeat
from celery_dq.other_brokers.server import OwnRedis, redis_of
from celery_dq.transport.aliases import TENANT_SCHEMES
from celery_dq.waker import Waker


class DedupLocksStep(bootsteps.StartStopStep):
    """Requests the dedup lock of every task that takes part in dedup.

    Does nothing on a tenant broker. It connects at the first call with a key, because calls may have keys
    even if no task has a dedup rule.

    Raises:
        ConfigurationError: A task takes part, but there is no Redis for the dedup locks: set
        ``dq_dedup_url``.
    """

    # This step stops before the step of singleton queues, so that a message has released its dedup lock
    # before it is released.
    requires = (
        "celery_dq.worker.task_events:TaskEventsStep",
        "celery_dq.other_brokers.singleton_step:SequencedSingletonStep",
    )

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._locks: WorkerDedupLocks | None = None
        self._waker = Waker(self._look)
        self._wake_pending = False
        self._consumer: Any = None
        app = consumer.app
        context = consumer.conninfo.transport_options.get(APP_CONTEXT)
        if not isinstance(context, AppContext) or consumer.conninfo.transport_cls in TENANT_SCHEMES:
            return
        try:
            coordinator = _coordinator(app, context, consumer.hostname)
        except ConfigurationError:
            if any(rule_of(task) is not None for task in app.tasks.values()):
                raise
            return  # most apps use neither dedup nor Redis
        claims = self._locks = WorkerDedupLocks(
            consumer, coordinator, WorkerDedupRequests(app).of, SystemClock()
        )
        subscriber = coordinator.new_client if isinstance(coordinator, OwnRedis) else None
        lease_s = context.options.lease_us / 1e6
        claims.heartbeat = DedupLockHeartbeat(
            coordinator,
            lease_s,
            self._wake,
            claims.on_lock_lost,
            subscriber,
            claims.unasked.silent,
            claims.unasked.answered,
        )
        claims.check_soon = self._wake

    def start(self, consumer: Any) -> None:
        """Register with the event loop, which may be a new one."""
        if self._locks is not None and consumer.hub is not None:
            self._waker.attach(consumer.hub)
        self._consumer = consumer

    def stop(self, consumer: Any) -> None:
        """Forget the waiting calls, before a reconnect and at the end."""
        if self._locks is not None:
            self._locks.forget_waiting()

    def shutdown(self, consumer: Any) -> None:
        """Stop the heartbeat. Leases expire, and the broker requeues waiting messages with the connection."""
        if self._locks is not None and self._locks.heartbeat is not None:
            self._locks.heartbeat.stop()
        self._waker.close()

    def _wake(self) -> None:
        """Schedule a check of the waiting calls in the consumer's thread. May be called from any thread."""
        if self._consumer is not None and self._consumer.hub is not None:
            self._waker.wake()
        elif self._consumer is not None and not self._wake_pending:
            # Without an event loop (green pools) the consumer may block in a read for seconds. The timer,
            # which starts tasks with an ETA, does not block.
            self._wake_pending = True
            self._consumer.timer.call_after(0, self._timed)

    def _timed(self) -> None:
        self._wake_pending = False
        self._look()

    def _look(self) -> None:
        assert self._locks is not None
        self._locks.look()


def _coordinator(app: Any, context: AppContext, hostname: str) -> Coordinator:
    try:
        url = redis_of(app, context.options)
    except ConfigurationError:
        if not str(app.conf.broker_read_url or app.conf.broker_url or "").startswith("memory://"):
            raise
        # memory:// has all its workers in one process.
        context.coordinator = local = LocalCoordinator()
        return local
    return OwnRedis(url, context.options, f"{hostname}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
