"""The seam under a partition: the duties of a store of messages to the brokers above it.

:class:`PartitionStore` is one queue, or one partition of it. The partition of the tenant broker in Redis
is its first holder. :mod:`celery_dq.transport.any_store` is a broker above any other holder: leases,
in-flight messages, acks and dead letters are those of the tenant broker there.

A method sends nothing. It returns a call, which its user runs on a client of its own, in its own thread.
A call is *atomic*: it happens as a whole or not at all, also when the process dies. Calls of several
clients happen one after the other. Times are those of the store.

A *tag* names one delivery of a message: its claim number and its message id. A tag is *stale* when the
message was claimed again, released, reaped or finished since. A call changes nothing for a stale tag, and
counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from celery_dq.transport.partition_replies import (
    ClaimReply,
    HeartbeatReply,
    OutgoingRecord,
    PurgeReply,
    PushReply,
    ReleaseMode,
)

__all__ = ["AckedQueue", "PartitionStore", "PausingStore", "StoreCall"]

C_contra = TypeVar("C_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class StoreCall(Protocol[C_contra, T_co]):
    """One atomic change of a partition, or a look at it, which has not happened yet."""

    def run(self, client: C_contra) -> T_co:
        """Make the call, wait for the store, and return its answer."""


class PartitionStore(Protocol[C_contra]):
    """The calls on one partition.

    A message *waits*, is *delayed* until its due time, is *held* by one consumer, or is *settled* by it. Only
    the consumer that holds a message can end it.
    """

    def push(
        self, messages: Sequence[OutgoingRecord], *, producer: str = ""
    ) -> StoreCall[C_contra, list[PushReply]]:
        """Store messages behind those of their priority.

        The header of a record (:mod:`celery_dq.transport.message_record`) has its priority, due time and
        expiry. With a `producer`, a sequence that is not above its last one is ``seen`` and changes nothing.
        """

    def claim(
        self, consumer: str, *, lease_ms: int, want: int, max_deliveries: int = 5, suspects: bool = True
    ) -> StoreCall[C_contra, ClaimReply]:
        """Renew the lease, and give messages to a consumer: the highest priority first, then the oldest.

        A *suspect*, a message that was held when a consumer was lost, comes alone, and only if `suspects`. A
        message that must not run comes with its reason: ``expired``; or ``dead:…`` after `max_deliveries`
        lost consumers (0: no limit), when it is a dead letter already. Claim numbers ascend.
        """

    def ack(
        self,
        consumer: str,
        *,
        settle: Sequence[tuple[str, str]] = (),
        finish: Sequence[tuple[str, str]] = (),
    ) -> StoreCall[C_contra, int]:
        """Settle and finish deliveries; the answer is the number of stale tags.

        A settled message is never delivered again, also if its consumer is lost. A finished one is deleted.
        """

    def release(
        self,
        consumer: str,
        tags: Sequence[tuple[str, str]],
        *,
        mode: ReleaseMode,
        max_deliveries: int = 5,
        worker: str = "",
    ) -> StoreCall[C_contra, int]:
        """Return messages to their old places; the answer is the number of stale tags.

        ``unstarted`` leaves no trace. After ``requeue`` the next delivery is ``returned``. ``crashed`` counts
        as a lost consumer, too. Settled messages end.
        """

    def dead_letter(
        self, consumer: str, tag: tuple[str, str], *, reason: str, worker: str, record: bytes = b""
    ) -> StoreCall[C_contra, str]:
        """Keep a delivery as a dead letter, with this record or the stored one; ``stale`` for a stale tag."""

    def heartbeat(
        self, consumer: str, *, lease_ms: int, max_deliveries: int = 5
    ) -> StoreCall[C_contra, HeartbeatReply]:
        """Renew the lease, and reap: messages of consumers whose lease has expired return to their places.

        The answer says whether the consumer had its lease until now, and when the next other lease expires.
        """

    def resign(self, consumer: str) -> StoreCall[C_contra, int]:
        """Release all messages as unstarted and end the lease; the answer is the number left: call again."""

    def depth(self) -> StoreCall[C_contra, int]:
        """Count the messages that wait, without delayed and held ones."""

    def purge(self) -> StoreCall[C_contra, PurgeReply]:
        """Remove waiting and delayed messages, and none that is held; call again while there are more."""


class PausingStore(PartitionStore[C_contra], Protocol[C_contra]):
    """A partition that can pause tenants: that of the tenant broker in Redis."""

    def requeue_and_pause(
        self,
        consumer: str,
        tag: tuple[str, str],
        *,
        record: bytes,
        for_us: int,
        cause: str,
        alone: bool,
    ) -> StoreCall[C_contra, int]:
        """Requeue a delivery with its record, and pause its tenant; the answer counts stale tags."""


class AckedQueue(Protocol[C_contra]):
    """A queue whose deliveries are acknowledged."""

    @property
    def key(self) -> str:
        """The name under which its in-flight messages are kept."""

    @property
    def partition(self) -> PartitionStore[C_contra]:
        """The partition with its messages."""

    @property
    def max_deliveries(self) -> int:
        """Lost consumers after which a message is dead; 0 means never."""

    def consumer(self, process: str) -> str:
        """Return the name under which a process consumes the queue."""
