"""What keeps the machines of all keys, for whoever consumes.

Two kinds: :class:`~celery_dq.dedup.local.LocalCoordinator` for the threads of one process, and
:class:`~celery_dq.dedup.redis.RedisCoordinator` for the workers of any broker. (The tenant broker keeps the
machines itself, in the scripts that also keep its messages.)

The life of a call::

    enqueue ──ACCEPT──▶ runs (token) ──finish──▶ gone
       │                  ▲      └────release──▶ waits
       ├──BLOCK──▶ waits ─┘ start                 │
       │             └────────withdraw────────────┴──▶ gone
       └──DECLINE──▶ gone at once

A call lives as long as its *lease*, which its owner renews while it waits and while it runs. What nobody
renews any more is dropped when the next one looks, so a crash delays a key by one lease and never longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypedDict

from celery_dq.dedup.machine import Policy, Verdict

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ClaimSnapshot", "Coordinator", "Grant", "Holding", "Terms", "Waiting"]


class Grant(NamedTuple):
    """What a call was told.

    Attributes:
        verdict: see :class:`~celery_dq.dedup.machine.Verdict`.
        covering: whose run serves a declined call; who is ahead of a blocked one; itself when accepted.
        token: fencing token of a run that begins now; 0 when the call waits or is declined.
        replaced: a call that waited and gave up its place; its owner learns it from ``start`` or ``renew``.
    """

    verdict: Verdict
    covering: str
    token: int
    replaced: str | None = None


class Terms(TypedDict, total=False):
    """On which terms a call wants a key.

    Attributes:
        task: which task it is a delivery of; that of the head makes it the heir; default none.
        policy: see :meth:`~celery_dq.dedup.machine.Machine.enqueue`; default ``"decline"``.
        waiting: see there; default 1.
        timeout: seconds after which its run may be evicted; default None, never.
        follow: should it be declined, its owner is to be told when the one that covers it is over.
    """

    task: str
    policy: Policy
    waiting: int
    timeout: float | None
    follow: bool


class Holding(NamedTuple):
    """A call that its owner takes care of; ``token`` is 0 while it waits."""

    key: str
    call: str
    token: int


class Waiting(NamedTuple):
    """Somebody who waits or runs, as a snapshot shows it; times in seconds.

    Attributes:
        call: who.
        owner: who renews it; ``""`` where nobody must.
        token: fencing token of its run, 0 while it waits.
        age: since it began to run.
        lease: until its lease ends.
        timeout: how long it may run; None is for ever.
        followers: how many declined calls want its result.
    """

    call: str
    owner: str
    token: int
    age: float
    lease: float
    timeout: float | None = None
    followers: int = 0


class ClaimSnapshot(NamedTuple):
    """How one key stands."""

    key: str
    head: Waiting | None
    heir: Waiting | None
    tail: Waiting | None


class Coordinator(Protocol):
    """One machine per key. Every method is atomic, among threads or processes as its kind says.

    A *call* here is one delivery of a task: a name that nobody else uses. A broker may deliver a task
    twice, and a retry has the id of the task that it repeats; both name the same *task*, and so come in the
    place of the head, not behind the tail.
    """

    def enqueue(self, key: str, call: str, **terms: Unpack[Terms]) -> Grant:
        """A call wants the key; when it is the head it begins to run. Asking twice is asking once.

        Arguments:
            key: the key.
            call: who.
            terms: see :class:`Terms`.
        """

    def start(self, key: str, call: str) -> int | None:
        """Begin to run if it is this call's turn.

        Returns:
            Its token; 0 while it must wait; None when it is not known: replaced, evicted, freed or dropped.
        """

    def finish(self, key: str, call: str, token: int) -> bool:
        """The run is over, and who waits may start. False when the key had been taken from it."""

    def release(self, key: str, call: str, token: int) -> bool:
        """The run did not take place: the call waits again, ahead of all others. False as in ``finish``."""

    def withdraw(self, key: str, call: str) -> bool:
        """A waiting call will not run. False when it is not known, or runs."""

    def renew(self, holdings: Sequence[Holding]) -> list[bool]:
        """Renew the leases; one answer each: False when it has been replaced, evicted, freed or dropped."""

    def inspect(self, key: str) -> ClaimSnapshot | None:
        """How the key stands; None when nobody claims it."""

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that somebody claims and that begin so, for a look; takes time."""

    def free(self, key: str) -> ClaimSnapshot | None:
        """Take the key from all who claim it, by an operator's order: their tokens are void.

        Returns:
            How it stood.
        """

    def verdicts(self, queue: str) -> dict[str, int]:
        """How often each was given to keys of a queue: accept, block, decline, replace, evict.

        The queue is what stands before the first ``|`` of a key.
        """
