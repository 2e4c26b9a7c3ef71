"""The state machine of one dedup key: which call runs, which one waits, and which ones are declined.

States::

    INIT ──enqueue──▶ PROCESS ──enqueue──▶ BLOCK ──enqueue──▶ DECLINE
     ▲                 │   ▲                │  ▲                 │
     └─────dequeue─────┘   └────dequeue─────┘  └───── at once ───┘

* *INIT*: there is no call. The next call becomes the *head*: ``ACCEPT``.
* *PROCESS*: there is a head. Until the head has *started*, it will read all data that a later call would
  read, so it covers that call: ``DECLINE``. A started head may have read old data: the next call becomes the
  *tail*, which waits: ``BLOCK``.
* *BLOCK*: there are head and tail. The tail has not started, so it covers every later call.
* *DECLINE*: a waiting call covers a new one. The new call is declined and gets the id of the covering call.
  The machine returns to *BLOCK* (or *PROCESS*) at once, so this state is never observed.

A head ends in one of four ways. It is done (:meth:`DedupMachine.dequeue`). It runs too long
(:meth:`DedupMachine.evict`). A retry, its *heir*, continues it, and takes the place of the head before the
tail does. Or the head is released, and waits again (:meth:`DedupMachine.release`).

Every start gets a *fencing token*, larger than all before. An evicted run still has its old token, with which
it can neither end nor release the present run. A store that remembers the largest token it has seen can
refuse the writes of the evicted run.

Pure: no clock, no lock, no I/O. The owner of a machine passes the time, and serialises the calls.

A *coordinator* has the machines of all keys, for processes that consume. There are two:
:class:`~celery_dq.dedup.local.LocalCoordinator` for the threads of one process, and
:class:`~celery_dq.other_brokers.redis_coordinator.RedisCoordinator` for the workers of any broker. (The
tenant broker keeps the machines itself, in the scripts that also keep its messages.)

The life of a call of a coordinator::

    enqueue ──ACCEPT──▶ runs (token) ──finish──▶ gone
       │                  ▲      └────release──▶ waits
       ├──BLOCK──▶ waits ─┘ start                 │
       │             └────────withdraw────────────┴──▶ gone
       └──DECLINE──▶ gone at once

A call lives as long as its *lease*, which its owner renews while the call waits and while it runs. The next
request for the key drops calls whose lease has ended, so a crash delays a key by at most one lease.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack

Policy = Literal["decline", "replace"]


class DedupState(enum.Enum):
    """The state of a machine; see the module."""

    INIT = "init"
    PROCESS = "process"
    BLOCK = "block"
    DECLINE = "decline"


class Verdict(str, enum.Enum):
    """The answer to a call: it is the head, it is the tail, or another call covers it."""

    ACCEPT = "accept"
    BLOCK = "block"
    DECLINE = "decline"


@dataclasses.dataclass(frozen=True, slots=True)
class DedupCall:
    """A call that a machine knows.

    Attributes:
        id: the unique name of the call, such as the task id.
        token: fencing token of its run; 0 until it starts.
        since: the time of its start, in the units of the machine's owner; 0 until then.
    """

    id: str
    token: int = 0
    since: float = 0.0

    @property
    def started(self) -> bool:
        """Whether the call has a token, and so runs."""
        return self.token > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The answer to :meth:`DedupMachine.enqueue`.

    Attributes:
        verdict: the answer to the call.
        covering: the call that covers a declined call or runs before a blocked one; the accepted call itself.
        replaced: the waiting call that lost its place to this one.
    """

    verdict: Verdict
    covering: str
    replaced: str | None = None


class DedupMachine:
    """The state machine of one dedup key. Not thread-safe."""

    __slots__ = ("head", "heir", "tail", "token")

    def __init__(self) -> None:
        self.head: DedupCall | None = None
        self.heir: DedupCall | None = None
        self.tail: DedupCall | None = None
        #: The largest fencing token given.
        self.token = 0

    @property
    def state(self) -> DedupState:
        """INIT, PROCESS or BLOCK; DECLINE is never observed."""
        if self.head is None:
            return DedupState.INIT
        return DedupState.PROCESS if self.heir is None and self.tail is None else DedupState.BLOCK

    def enqueue(
        self,
        call: str,
        *,
        policy: Policy = "decline",
        waiting: int = 1,
        continues: tuple[str, int] | None = None,
        again: str | None = None,
    ) -> Decision:
        """Request the key for a call.

        Args:
            call: the name of a call that the machine does not know yet.
            policy: ``replace`` gives the call the place of a waiting one; ``decline`` does not.
            waiting: 1, or 0 when no call may wait behind a head that has started.
            continues: (id, token) of the run that this call repeats or replaces. If that run is the head,
                the call becomes its heir: it is accepted, even if a tail waits. A released head has token 0,
                and is replaced at once.
            again: the call of which this one is another delivery. If that call is the heir or the tail, this
                one takes its place under either policy, because it must not be declined in favour of itself.
        """
        head = self.head
        if head is None:
            self.head = DedupCall(call)
            return Decision(Verdict.ACCEPT, call)
        if self.heir is None and continues == (head.id, head.token):
            if head.started:
                self.heir = DedupCall(call)
            else:
                self.head = DedupCall(call)
            return Decision(Verdict.ACCEPT, call)
        if self.heir is not None and self.heir.id == again:
            return self._take_place("heir", self.heir, call, "replace", Verdict.ACCEPT)
        if self.tail is not None and self.tail.id == again:
            return self._take_place("tail", self.tail, call, "replace", Verdict.BLOCK)
        alone = self.heir is None and self.tail is None
        if not head.started and (alone or policy == "decline"):
            return self._take_place("head", head, call, policy, Verdict.ACCEPT)
        if self.tail is not None:
            return self._take_place("tail", self.tail, call, policy, Verdict.BLOCK)
        if self.heir is not None and policy == "decline":
            return Decision(Verdict.DECLINE, self.heir.id)
        if not waiting:
            return Decision(Verdict.DECLINE, head.id)
        self.tail = DedupCall(call)
        return Decision(Verdict.BLOCK, head.id)

    def _take_place(
        self, place: str, waits: DedupCall, call: str, policy: Policy, verdict: Verdict
    ) -> Decision:
        if policy == "decline":
            return Decision(Verdict.DECLINE, waits.id)
        setattr(self, place, DedupCall(call))
        ahead = self.head.id if self.head is not None and place == "tail" else call
        return Decision(verdict, ahead, replaced=waits.id)

    def start(self, call: str, token: int, now: float) -> bool:
        """Start the head under `token`. Returns False when the call is not the head, or runs already.

        Raises:
            ValueError: the token is not larger than all before.
        """
        if self.head is None or self.head.id != call or self.head.started:
            return False
        if token <= self.token:
            raise ValueError(f"fencing token {token} is not larger than {self.token}, which was given before")
        self.token = token
        self.head = DedupCall(call, token, now)
        return True

    def release(self, call: str, token: int) -> bool:
        """Undo the start of the head, which waits again. Returns False when another call runs."""
        if not self._runs(call, token):
            return False
        self.head = DedupCall(call)
        return True

    def dequeue(self, call: str, token: int = 0) -> bool:
        """End a call: a run under `token`, or, with 0, a call that has not started.

        The heir, else the tail, becomes the head and may start. Returns False, and changes nothing, when the
        machine does not know the call, or knows it under another token.
        """
        if token:
            if not self._runs(call, token):
                return False
            self._promote()
            return True
        if self.head is not None and self.head.id == call and not self.head.started:
            self._promote()
        elif self.heir is not None and self.heir.id == call:
            self.heir = None
        elif self.tail is not None and self.tail.id == call:
            self.tail = None
        else:
            return False
        return True

    def evict(self, now: float, timeout: float) -> DedupCall | None:
        """Take the key from a head that has been running for `timeout`; return that head, or None."""
        head = self.head
        if head is None or not head.started or now - head.since < timeout:
            return None
        self._promote()
        return head

    def _runs(self, call: str, token: int) -> bool:
        return self.head is not None and self.head.id == call and self.head.token == token > 0

    def _promote(self) -> None:
        if self.heir is not None:
            self.head, self.heir = self.heir, None
        else:
            self.head, self.tail = self.tail, None


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
