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
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

__all__ = ["DedupCall", "Decision", "DedupMachine", "Policy", "DedupState", "Verdict"]

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
