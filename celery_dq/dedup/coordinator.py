"""The interface to the dedup machines of all keys, for processes that consume.

There are two coordinators: :class:`~celery_dq.dedup.local.LocalCoordinator` for the threads of one process,
and :class:`~celery_dq.other_brokers.redis_coordinator.RedisCoordinator` for the workers of any broker.
(The tenant broker keeps the machines itself, in the scripts that also keep its messages.)

The life of a call::

    enqueue ──ACCEPT──▶ runs (token) ──finish──▶ gone
       │                  ▲      └────release──▶ waits
       ├──BLOCK──▶ waits ─┘ start                 │
       │             └────────withdraw────────────┴──▶ gone
       └──DECLINE──▶ gone at once

A call lives as long as its *lease*, which its owner renews while the call waits and while it runs. The next
request for the key drops calls whose lease has ended, so a crash delays a key by at most one lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypedDict

from celery_dq.dedup.machine import Policy, Verdict

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "CoordinatorLockSnapshot",
    "Coordinator",
    "DedupResult",
    "HeldDedupLock",
    "DedupOptions",
    "WaitingCall",
]


class DedupResult(NamedTuple):
    """The answer to a request for a dedup lock.

    Attributes:
        verdict: see :class:`~celery_dq.dedup.machine.Verdict`.
        covering: the call that covers a declined call or is ahead of a blocked one; the accepted call itself.
        token: fencing token of a run that begins now; 0 when the call waits or is declined.
        replaced: a waiting call that lost its place; ``start`` or ``renew`` report it to its owner.
        left: the task that covered an earlier delivery has left, and `covering` is its id. If that task has
            no result, forget the delivery and ask again.
    """

    verdict: Verdict
    covering: str
    token: int
    replaced: str | None = None
    left: bool = False


class DedupOptions(TypedDict, total=False):
    """The options of a request for a dedup lock.

    Attributes:
        task: the task of which the call is a delivery. A delivery of the head's task becomes the heir.
            Default: no task.
        policy: see :meth:`~celery_dq.dedup.machine.DedupMachine.enqueue`; default ``"decline"``.
        waiting: see :meth:`~celery_dq.dedup.machine.DedupMachine.enqueue`; default 1.
        timeout: seconds after which its run may be evicted; default None, never.
        follow: wake the owner of a declined call when the covering call is over; default False.
    """

    task: str
    policy: Policy
    waiting: int
    timeout: float | None
    follow: bool


class HeldDedupLock(NamedTuple):
    """A call whose lease its owner renews. ``token`` is 0 while the call waits."""

    key: str
    call: str
    token: int


class WaitingCall(NamedTuple):
    """A call that waits or runs, in a snapshot. Times are in seconds.

    Attributes:
        call: the name of the call.
        owner: the process that renews it; ``""`` where there are no leases.
        token: fencing token of its run, 0 while it waits.
        age: time since it began to run.
        lease: time until its lease ends.
        timeout: how long it may run; None is without a limit.
        followers: how many declined calls want its result.
    """

    call: str
    owner: str
    token: int
    age: float
    lease: float
    timeout: float | None = None
    followers: int = 0


class CoordinatorLockSnapshot(NamedTuple):
    """The state of one key."""

    key: str
    head: WaitingCall | None
    heir: WaitingCall | None
    tail: WaitingCall | None


class Coordinator(Protocol):
    """One dedup machine per key. Every method is atomic among the threads, or processes, of the coordinator.

    A *call* is one delivery of a task, with a unique name. A broker may deliver a task twice, and a retry has
    the id of the task that it repeats. Both name the same *task*, and so take the place of the head instead
    of one behind the tail.
    """

    def enqueue(self, key: str, call: str, **options: Unpack[DedupOptions]) -> DedupResult:
        """Request the lock for a call. The call begins to run if it is the head. Idempotent.

        Args:
            key: the dedup key.
            call: the name of the call.
            options: see :class:`DedupOptions`.
        """

    def start(self, key: str, call: str) -> int | None:
        """Begin to run if it is this call's turn.

        Returns:
            The fencing token of the run; 0 while the call must wait; None when the call is unknown, because
            it was replaced, evicted, freed or dropped.
        """

    def finish(self, key: str, call: str, token: int) -> bool:
        """End a run, so that a waiting call may start. Returns False when the run had lost the lock."""

    def release(self, key: str, call: str, token: int) -> bool:
        """Undo the start of a run: the call waits again, ahead of all others. Returns as ``finish`` does."""

    def withdraw(self, key: str, call: str) -> bool:
        """Remove a waiting call. Returns False when the call is unknown, or runs."""

    def renew(self, holdings: Sequence[HeldDedupLock]) -> list[bool]:
        """Renew the leases. The answer for a call that was replaced, evicted, freed or dropped is False."""

    def remember_covered(self, task: str, covering: str) -> None:
        """Remember that a task waits for the result of the task `covering`, for another delivery of it.

        A declined call with ``follow`` is remembered by :meth:`enqueue`.
        """

    def forget_covered(self, task: str) -> None:
        """Forget a declined task: it has its result, or will not get the result of the covering task."""

    def inspect(self, key: str) -> CoordinatorLockSnapshot | None:
        """The state of the key; None when no call holds or awaits its lock."""

    def keys(self, prefix: str = "") -> list[str]:
        """All keys with a dedup lock that begin with `prefix`. Slow: for inspection only."""

    def free(self, key: str) -> CoordinatorLockSnapshot | None:
        """Remove all calls of a key, by an operator's order. Their tokens become void.

        Returns:
            The state of the key before.
        """

    def count_decline(self, key: str) -> None:
        """Count a call that was declined without a request, because another call of its queue covers it."""

    def verdicts(self, queue: str) -> dict[str, int]:
        """How often each verdict was given in a queue: accept, block, decline, replace, evict.

        The queue of a key is the part before its first ``|``.
        """
