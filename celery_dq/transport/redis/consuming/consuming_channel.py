"""The parts of a kombu channel that consuming needs, as protocols.

``transport.redis.channel`` implements them. The packages below it import this module, not the channel, so
that imports go down only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import redis

from celery_dq.errors import CorruptRecord
from celery_dq.protocols import Leaderships, PartitionAllocation, WorkerCapacity
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.consuming.claim_limits import CallbackPace
from celery_dq.transport.redis.consuming.wakeups import WakeupGroups
from celery_dq.transport.redis.in_flight.script_pipeline import ScriptPipeline
from celery_dq.transport.redis.store.queue import Queue


class DeclaredQueues(Protocol):
    """The queues that a channel has declared together, as its consumer uses them."""

    def was_empty(self, partition: Queue) -> bool:
        """Return whether a partition stored no message when it was declared, a moment ago."""

    @property
    def has_empty(self) -> bool:
        """Whether :meth:`was_empty` is true of any partition."""


class SharedContext(Protocol):
    """The state that all channels of a connection share."""

    @property
    def leaderships(self) -> Leaderships | None:
        """The singleton queues of this worker, or None outside of a worker."""

    @property
    def allocation(self) -> PartitionAllocation | None:
        """The partitions that this worker serves, or None where it serves all that it consumes."""


class WatchedSocket(NamedTuple):
    """A connection whose socket a poller watches.

    Attributes:
        kind: ``scripts``, ``wakeups``, ``messages`` or ``broadcasts``.
        connection: The redis-py connection.
        read: Reads what has arrived; returns whether it was a message of a transient queue or a broadcast.
    """

    kind: str
    connection: Any
    read: Callable[[], object]


class PolledConsumer(Protocol):
    """The consumer of a channel, as its poller uses it."""

    @property
    def has_undelivered(self) -> bool:
        """Whether claimed messages wait for their delivery."""

    @property
    def pace(self) -> CallbackPace:
        """How long its callbacks take."""

    def was_busy_since(self, moment: float) -> bool:
        """Whether a message was delivered after this monotonic time."""

    def deliver_one(self) -> bool:
        """Deliver the next claimed message; return whether a consumer received it."""

    def deliver_all(self) -> None:
        """Deliver the claimed messages."""


class ChannelPoller(Protocol):
    """The poller of a channel, as its consumer uses it."""

    @property
    def is_driven(self) -> bool:
        """Whether an event loop or ``drain_events`` runs."""

    def wake(self) -> None:
        """End the present wait."""


class ConsumingChannel(Protocol):
    """The channel whose sockets a ``Poller`` watches, and which a ``ChannelConsumer`` serves."""

    closed: bool

    @property
    def consumer(self) -> PolledConsumer:
        """The consumer of the channel."""

    @property
    def has_inbox(self) -> bool:
        """Whether claimed messages wait for their delivery."""

    @property
    def expects_answer(self) -> bool:
        """Whether a script was sent whose answer has not been read."""

    def tick(self) -> None:
        """Send what is due."""

    def connections(self) -> list[WatchedSocket]:
        """Return the open connections."""

    def on_readable(self, watched: WatchedSocket, deliver: bool) -> bool:
        """Read what has arrived; return whether a message was delivered."""

    def next_deadline(self) -> float:
        """Return the monotonic time of the next tick that is due; infinity for none."""

    def send_acks_after_batch(self) -> None:
        """Send pending acks when no message waits for its delivery."""

    def follow_leaderships(self) -> None:
        """Deliver the next messages of singleton queues."""

    @property
    def pipeline_class(self) -> type[ScriptPipeline]:
        """Class of the script pipeline."""

    @property
    def wakeups_class(self) -> type[WakeupGroups]:
        """Class of the wait for wake-ups."""

    @property
    def poller(self) -> ChannelPoller:
        """The poller of the connection."""

    @property
    def ahead(self) -> DeclaredQueues:
        """The queues that were declared together."""

    @property
    def in_flight(self) -> InFlightMessages:
        """The messages that the process holds."""

    @property
    def context(self) -> SharedContext:
        """The state shared by all channels of the connection."""

    @property
    def capacity(self) -> WorkerCapacity | None:
        """The free capacity of the worker, or None outside of a worker."""

    @property
    def qos(self) -> Any:
        """The prefetch count, with kombu's interface."""

    @property
    def client(self) -> redis.Redis:
        """The client for commands that are waited for."""

    @property
    def async_pool(self) -> Any:
        """The connection pool of the event loop."""

    def heartbeat_clients(self) -> Callable[[], redis.Redis]:
        """Return a function that makes clients for the heartbeat thread."""

    def read_all_answers(self) -> None:
        """Read the answers that are under way, where no event loop does."""

    def send_all_acks(self) -> None:
        """Send the pending acks, where no event loop does."""

    def dead_letter_unreadable(self, queue: Queue, entry: ClaimedEntry, tag: str, why: CorruptRecord) -> None:
        """Store a message that cannot be read as a dead letter."""
