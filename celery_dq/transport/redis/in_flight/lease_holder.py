"""The process whose leases are renewed, as the heartbeat sees it."""

from __future__ import annotations

from typing import Protocol

from celery_dq.clock import Clock
from celery_dq.per_process import OwnerProcess
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.partition_replies import HeartbeatReply
from celery_dq.transport.redis.in_flight.data_loss import DataLoss
from celery_dq.transport.redis.in_flight.in_doubt import InDoubtClaims
from celery_dq.transport.redis.in_flight.server_clock import ServerClock
from celery_dq.transport.redis.store.queue import Queue


class LeaseHolder(Protocol):
    """The process whose leases are renewed; ``ConsumerIdentity`` is it."""

    owner: OwnerProcess
    consumer: str
    clock: Clock
    lease_s: float
    lease_ms: int
    in_flight: InFlightMessages
    in_doubt: InDoubtClaims
    data_loss: DataLoss
    server_clock: ServerClock

    def renewed(self, queue: Queue, renewal: HeartbeatReply, sent_at: float) -> None:
        """Record the answer to a renewal that was sent at monotonic *sent_at*."""

    def not_renewed(self, queue: Queue, error: Exception) -> None:
        """Note a renewal that failed with *error*."""
