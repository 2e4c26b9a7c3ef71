"""Protocols by which packages that do not import each other use each other.

``celery_dq.wiring`` hands an implementation to the package that asks. The names of the headers and properties
that both sides of such a seam read stand here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

#: The message header with the fencing token of the leader; set again at each delivery.
TOKEN_HEADER = "dq_token"  # noqa: S105 - the name of a header
#: The message header with the name of the queue that the token belongs to.
QUEUE_HEADER = "dq_queue"
#: The message header with the resource that has taken a message of a set; set again at each delivery.
RESOURCE_HEADER = "dq_resource"
#: The message header with the number of workers that were lost with the message; redelivered messages only.
DELIVERIES_HEADER = "dq_deliveries"
#: The attribute of a request that only receives the result for a duplicate, in the main process of a worker.
FOLLOWS = "dq_follows"


#: The property of a message with its :class:`DedupRequest` for the transport.
DEDUP_PROPERTY = "dq_dedup"


#: The property of a message whose ETA the publisher computed from a countdown, by its own clock.
COUNTDOWN = "dq_countdown"


#: The property of a message that continues a run, such as the next step of a chain. No bound refuses it.
CONTINUES = "dq_continues"


#: The header of a call that has the tenant of the task that made it, because it names none. It is for people.
INHERITED_HEADER = "dq_inherited"


#: The header with the dedup key of a call, for workers on other brokers; empty for an excluded call.
DEDUP_HEADER = "dq_claim"


class DedupRequest(Protocol):
    """The dedup request of a call, for which the transport of a tenant broker gets a verdict.

    Attributes:
        section: The dedup section of the record, packed by the rules of the transport.
    """

    section: bytes

    def receive_verdict(self, status: str, message_id: str, covering: str, replaced: str) -> None:
        """Receive the verdict.

        Args:
            status: Answer of the push script, see ``PushReply`` of the transport.
            message_id: Id of the message that was stored.
            covering: Id of the message that covers a declined call; else "".
            replaced: Id of the waiting message that this call replaced; else "".
        """


class DiscardHandler(Protocol):
    """The interface of Celery's bookkeeping for messages that will not run."""

    def deliver_discard(self, message: Any, reason: str) -> bool:
        """Do Celery's bookkeeping for a message that will not run.

        Args:
            message: The message.
            reason: Why it will not run, for example expired, cancelled or dead.

        Returns:
            False when the bookkeeping is not possible (an unknown task). The transport then finishes the
            message.
        """


class WorkerCapacity(DiscardHandler, Protocol):
    """The capacity of the worker in this process, for the transport.

    All methods are called often, from the thread that claims messages, and must not block.

    Attributes:
        runs_tasks_in_loop: Whether the pool runs tasks inside the event loop (solo), which stops meanwhile.
    """

    runs_tasks_in_loop: bool

    @property
    def singleton_window(self) -> int:
        """How many messages of a singleton queue the worker may hold.

        With more than one, each starts only if ``may_start`` of the transport allows it at that time.
        """

    @property
    def has_startable(self) -> bool:
        """Whether a request that waited for the end of another message may start."""

    def awaits_end_of(self, tag: str) -> bool:
        """Return whether a request waits for the end of the message with this delivery tag."""

    def start_ready(self) -> None:
        """Start the requests that may start."""

    @property
    def closing(self) -> bool:
        """Whether the worker shuts down, so that no task may start."""

    def slots(self) -> int | None:
        """Return how many tasks the pool may run at a time; None when the pool has no such number."""

    def free_slots(self) -> int | None:
        """Return how many pool slots are free, below zero when more is reserved; None without a limit."""

    def claim_ahead(self) -> int:
        """Return how many messages beyond the slots, reserved ones among them, fit the claim-ahead time."""

    def running_tags(self) -> frozenset[str]:
        """Return the delivery tags of running tasks, whose messages survive a lost connection."""

    def started_tags(self) -> frozenset[str]:
        """Return those of :meth:`running_tags` that have begun, and continue after a lost lease."""


class SingletonConsumer(Protocol):
    """The transport's state of the singleton queues that it consumes. Thread-safe."""

    def is_busy(self, queue: str, token: int) -> bool:
        """Return whether a message of that term is in flight, or its ack is not confirmed."""

    def is_cut_off(self, queue: str, token: int) -> bool:
        """Return whether the broker was silent for a whole lease, so that messages may run elsewhere."""


class TermPermit(Protocol):
    """One leadership term of this process."""

    @property
    def is_firm(self) -> bool:
        """Whether the next message may start now. False for good when the term is over."""


class Leaderships(Protocol):
    """Which queues are singleton queues, and which of them this process leads.

    All methods are called often, from the thread that fetches messages, and must not block.
    """

    def is_singleton(self, queue: str) -> bool:
        """Return whether the queue is a singleton queue."""

    def term_token(self, queue: str) -> int:
        """Return the fencing token of this process's term, once its messages may run; else 0."""

    def is_current(self, queue: str, token: int) -> bool:
        """Return whether the next message may start now, in the term with this token."""

    def permit(self, queue: str, token: int) -> TermPermit | None:
        """Return the term with this token, which is checked before each message; None when it is over."""

    def report_fenced(self, queue: str, token: int) -> None:
        """Report that the broker knows a later leader than `token`."""

    def report_doubt(self, queue: str, token: int) -> None:
        """Report that the messages of a term are unknown, so that it must end by a hand-over."""

    def attach_consumer(self, queue: str, consumption: SingletonConsumer) -> None:
        """Set the consumer of a singleton queue."""

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a listener. Any thread calls it when an answer of another method may have changed."""

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Remove a listener."""


class PartitionAllocation(Protocol):
    """Which partitions of its queues this worker serves.

    The methods are called from the thread that fetches messages and from the heartbeat thread, and must not
    block.
    """

    @property
    def version(self) -> int:
        """A number that changes when an answer of :meth:`served` may have changed."""

    def consumes(self, queue: str, count: int) -> None:
        """Report a consumed queue and its number of partitions, which the broker has just answered."""

    def served(self, queue: str) -> frozenset[int] | None:
        """Return the numbers of the partitions to serve; None means all of them."""

    def broker_answered(self) -> None:
        """Report that the broker has answered a heartbeat."""

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a listener. Any thread calls it when :attr:`version` has changed."""

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Remove a listener."""
