"""The parts of a kombu channel that consuming needs, as protocols.

``transport.redis.channel`` implements them. The packages below it import this module, not the channel, so
that imports go down only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import redis

from celery_dq.errors import CorruptRecord
from celery_dq.protocols import Leaderships, PartitionAllocation, WorkerCapacity
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.consuming.wakeups import WakeupGroups
from celery_dq.transport.redis.in_flight.script_pipeline import ScriptPipeline
from celery_dq.transport.redis.store.queue import Queue

if TYPE_CHECKING:
    from celery_dq.transport.redis.consuming.channel_consumer import ChannelConsumer
    from celery_dq.transport.redis.consuming.poller import Poller


class SharedContext(Protocol):
    """The state that all channels of a connection share."""

    @property
    def leaderships(self) -> Leaderships | None:
        """The singleton queues of this worker, or None outside of a worker."""

    @property
    def allocation(self) -> PartitionAllocation | None:
        """The partitions that this worker serves, or None where it serves all that it consumes."""


class WatchedConnection(NamedTuple):
    """A connection whose socket a poller watches.

    Attributes:
        kind: ``scripts``, ``wakeups``, ``messages`` or ``broadcasts``.
        connection: The redis-py connection.
        read: Reads what has arrived; returns whether it was a message of a transient queue or a broadcast.
    """

    kind: str
    connection: Any
    read: Callable[[], object]


class ConsumingChannel(Protocol):
    """The channel whose sockets a ``Poller`` watches, and which a ``ChannelConsumer`` serves."""

    closed: bool

    @property
    def consumer(self) -> ChannelConsumer:
        """The consumer of the channel."""

    @property
    def has_inbox(self) -> bool:
        """Whether claimed messages wait for their delivery."""

    @property
    def expects_answer(self) -> bool:
        """Whether a script was sent whose answer has not been read."""

    def tick(self) -> None:
        """Send what is due."""

    def connections(self) -> list[WatchedConnection]:
        """Return the open connections."""

    def on_readable(self, watched: WatchedConnection, deliver: bool) -> bool:
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
    def poller(self) -> Poller:
        """The poller of the connection."""

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
