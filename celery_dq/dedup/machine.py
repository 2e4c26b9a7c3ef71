"""The machine of one key: who runs, who waits, and who need not.

States::

    INIT ──enqueue──▶ PROCESS ──enqueue──▶ BLOCK ──enqueue──▶ DECLINE
     ▲                 │   ▲                │  ▲                 │
     └─────dequeue─────┘   └────dequeue─────┘  └───── at once ───┘

* *INIT*: nobody. The next call becomes the *head*: ``ACCEPT``.
* *PROCESS*: there is a head. Until it has *started*, it will see all that a later call would, so it covers
  that call: ``DECLINE``. Once it has started, what it read may be old: the next call becomes the *tail*,
  which waits: ``BLOCK``.
* *BLOCK*: head and tail. The tail has not started, so it covers every later call.
* *DECLINE*: a call came while somebody who waits covers it. It is turned away and told by whom; the machine
  is in *BLOCK* (or *PROCESS*) again at once, so nobody ever sees it in this state.

A head ends in one of four ways: it is done (:meth:`Machine.dequeue`), it runs too long
(:meth:`Machine.evict`), it is continued by a retry, its *heir*, which takes the place of the head before
the tail does, or it goes back to where it waited (:meth:`Machine.release`).

Every start gets a *fencing token*, larger than all before. A run that was evicted still holds its old
token, with which it can neither end nor release what runs by then; and a store that remembers the largest
token it has seen can refuse the writes of such a run.

Pure: no clock, no lock, no I/O. Whoever keeps machines gives them the time and guards them.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

__all__ = ["Call", "Decision", "Machine", "Policy", "State", "Verdict"]

Policy = Literal["decline", "replace"]


class State(enum.Enum):
    """Where a machine stands; see the module."""

    INIT = "init"
    PROCESS = "process"
    BLOCK = "block"
    DECLINE = "decline"


class Verdict(str, enum.Enum):
    """What a call is told: it is the head, it is the tail, or another one covers it."""

    ACCEPT = "accept"
    BLOCK = "block"
    DECLINE = "decline"


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call that a machine knows.

    Attributes:
        id: who: the task id, or whatever names one call.
        token: fencing token of its run; 0 until it starts.
        since: when it started, in the units of whoever keeps the machine; 0 until then.
    """

    id: str
    token: int = 0
    since: float = 0.0

    @property
    def started(self) -> bool:
        """It has a token, so it runs."""
        return self.token > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The answer to :meth:`Machine.enqueue`.

    Attributes:
        verdict: what the call is told.
        covering: whose run serves a declined call; who runs before a blocked one; itself when accepted.
        replaced: a call that waited and gave up its place to this one.
    """

    verdict: Verdict
    covering: str
    replaced: str | None = None


class Machine:
    """The machine of one key. Not thread-safe."""

    __slots__ = ("head", "heir", "tail", "token")

    def __init__(self) -> None:
        self.head: Call | None = None
        self.heir: Call | None = None
        self.tail: Call | None = None
        #: The largest fencing token given.
        self.token = 0

    @property
    def state(self) -> State:
        """INIT, PROCESS or BLOCK: whoever looks never finds it in DECLINE."""
        if self.head is None:
            return State.INIT
        return State.PROCESS if self.heir is None and self.tail is None else State.BLOCK

    def enqueue(
        self,
        call: str,
        *,
        policy: Policy = "decline",
        waiting: int = 1,
        continues: tuple[str, int] | None = None,
        again: str | None = None,
    ) -> Decision:
        """A call wants the key.

        Arguments:
            call: who; not one that the machine knows already.
            policy: ``replace`` gives the call the place of one that waits; ``decline`` does not.
            waiting: 1, or 0 when nobody is to wait behind a head that has started.
            continues: (id, token) of the run that this call repeats or replaces. When that is the head, the
                call is its heir: accepted, whoever else waits. A head that was released has token 0, and is
                replaced at once.
            again: a call of which this one is another delivery. When that is the heir or the tail, this one
                has its place, whatever the policy: it must not be declined in favour of itself.
        """
        head = self.head
        if head is None:
            self.head = Call(call)
            return Decision(Verdict.ACCEPT, call)
        if self.heir is None and continues == (head.id, head.token):
            if head.started:
                self.heir = Call(call)
            else:
                self.head = Call(call)
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
        self.tail = Call(call)
        return Decision(Verdict.BLOCK, head.id)

    def _take_place(self, place: str, waits: Call, call: str, policy: Policy, verdict: Verdict) -> Decision:
        if policy == "decline":
            return Decision(Verdict.DECLINE, waits.id)
        setattr(self, place, Call(call))
        ahead = self.head.id if self.head is not None and place == "tail" else call
        return Decision(verdict, ahead, replaced=waits.id)

    def start(self, call: str, token: int, now: float) -> bool:
        """The head starts to run, under `token`. False when it is not the head, or runs already.

        Raises:
            ValueError: the token is not larger than all before.
        """
        if self.head is None or self.head.id != call or self.head.started:
            return False
        if token <= self.token:
            raise ValueError(f"fencing token {token} is not larger than {self.token}, which was given before")
        self.token = token
        self.head = Call(call, token, now)
        return True

    def release(self, call: str, token: int) -> bool:
        """The head goes back to where it waited; False when another one runs by now."""
        if not self._runs(call, token):
            return False
        self.head = Call(call)
        return True

    def dequeue(self, call: str, token: int = 0) -> bool:
        """A call is over: done with `token`, or, with 0, given up before it started.

        The heir, else the tail, becomes the head and may start. False when the call is none of the machine's
        (any more): nothing changes then.
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

    def evict(self, now: float, timeout: float) -> Call | None:
        """Take the key from a head that has been running for `timeout`; return it, or None."""
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
