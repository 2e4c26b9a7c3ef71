"""The career of a leader: what a term is, and until when it may be trusted. No library, no I/O.

A process that stands for a leadership is a *candidate* until it is elected. Each election won begins a
*term*, which has a *fencing token*: a number greater than that of every earlier term. A term goes through
these phases, never back::

    INAUGURATING ──inaugurated──▶ EXECUTING ──end──▶ HANDING_OVER ──close──▶ OVER
          │                           │                   │                    ▲
          └───────────────────── trust ends ──────────────┘                    │
                                      ▼                                        │
                                   FALLEN ───────────────close─────────────────┘

* *INAUGURATING*: elected; taking over from the predecessor. No message yet.
* *EXECUTING*: messages are executed, as long as the term is *firm*.
* *HANDING_OVER*: the leader steps down by itself; what runs may finish, nothing new is taken.
* *FALLEN*: trust ended. What runs must be stopped; its effects are refused where tokens are checked.
* *OVER*: nothing of this term runs any more.

**Trust.** A leader cannot see that it was replaced; it can only know that it was not yet. A renewal that
the server confirmed, *sent* at time t, proves that nobody else leads before t + session, because the
server lets the session of a silent leader live that long. So the term is

* *firm* until t + 0.4 session: something new may start,
* *trusted* until t + 0.6 session: what runs may run on,
* fallen after that, even if a later renewal succeeds: the time left until the session ends belongs to
  stopping what runs.

A connection known to be broken makes a term infirm at once. All times are of a monotonic clock that goes on
while the machine is suspended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from celery_dq.clock import Clock

__all__ = ["DOUBT", "TRUST", "Career", "Phase", "Term"]

#: Shares of a session since the last confirmed renewal was sent; see the module.
DOUBT = 0.4
TRUST = 0.6

Message = TypeVar("Message")


class Phase(Enum):
    """Where a term stands; see the module."""

    INAUGURATING = "inaugurating"
    EXECUTING = "executing"
    HANDING_OVER = "handing over"
    FALLEN = "fallen"
    OVER = "over"


#: To find a member of an enumeration by its name takes longer than to compare it.
_EXECUTING = Phase.EXECUTING
#: Nothing follows these but the end.
ENDING = (Phase.HANDING_OVER, Phase.FALLEN, Phase.OVER)


class Term:
    """One time in office. Thread-safe.

    :param name: what is led.
    :param token: the fencing token, above all earlier ones.
    :param sent_at: monotonic time at which the write that won the election was sent.
    :param session_s: how long the server keeps the session of a silent leader, in seconds.
    :param on_fall: called when it falls, by whoever notices; it must not block.
    """

    def __init__(
        self,
        name: str,
        token: int,
        sent_at: float,
        session_s: float,
        clock: Clock,
        on_fall: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.token = token
        self.session_s = session_s
        #: Wall time of the election, to show.
        self.since = clock.wall()
        #: Why it ended; "" until it ends.
        self.reason = ""
        #: Whether it has come to execute anything.
        self.executed = False
        self._clock = clock
        self._on_fall = on_fall
        self._confirmed_at = sent_at
        self._doubt_at = sent_at + DOUBT * session_s
        self._suspended = False
        self._phase = Phase.INAUGURATING
        self._lock = threading.Lock()
        self._ending = threading.Event()

    # -- looking

    @property
    def phase(self) -> Phase:
        """Where it stands. Looking is what notices that trust has ended."""
        if self._age() < TRUST * self.session_s:
            return self._phase  # asked for every message: no lock without need
        with self._lock:
            self._look()
            return self._phase

    @property
    def firm(self) -> bool:
        """Whether something new may start."""
        # Asked several times for every message. Trust has not ended where there is not even a doubt, so that
        # nothing need be noticed here.
        return self._phase is _EXECUTING and not self._suspended and self._clock.monotonic() < self._doubt_at

    @property
    def lasts(self) -> bool:
        """Whether what was taken before the term began to end may start now: it is as sure as a firm one."""
        with self._lock:
            self._look()
            sure = not self._suspended and self._clock.monotonic() < self._doubt_at
            return sure and self._phase in (Phase.EXECUTING, Phase.HANDING_OVER)

    @property
    def trusted(self) -> bool:
        """Whether nobody else can lead yet: what runs may run on."""
        with self._lock:
            self._look()
            return self._phase not in (Phase.FALLEN, Phase.OVER)

    @property
    def trust_left_s(self) -> float:
        """Seconds until trust ends unless a renewal is confirmed; below zero when it has."""
        return TRUST * self.session_s - self._age()

    @property
    def ended(self) -> bool:
        """Whether it is about to end or has ended: see :attr:`reason`."""
        return self.phase in ENDING

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is about to end; return whether it is."""
        if timeout_s is None or timeout_s > 0:
            self._ending.wait(timeout_s)
        return self.ended

    # -- what happens to it

    def confirmed(self, sent_at: float) -> bool:
        """A renewal sent at monotonic `sent_at` was confirmed. Returns whether the term is trusted.

        One that arrives after trust has ended changes nothing.
        """
        with self._lock:
            self._look()
            if self._phase in (Phase.FALLEN, Phase.OVER):
                return False
            self._confirmed_at = max(self._confirmed_at, sent_at)
            self._doubt_at = self._confirmed_at + DOUBT * self.session_s
            return True

    def suspend(self, suspended: bool) -> None:
        """The connection to the server is known to be broken, or whole again."""
        self._suspended = suspended

    def inaugurated(self) -> bool:
        """The inauguration is done. Returns whether the term executes now; it may have ended meanwhile."""
        with self._lock:
            self._look()
            if self._phase is Phase.INAUGURATING:
                self._phase = Phase.EXECUTING
                self.executed = True
            return self._phase is Phase.EXECUTING

    def end(self, reason: str) -> None:
        """Step down in good order: nothing new starts."""
        with self._lock:
            self._look()
            if self._phase not in ENDING:
                self._change(Phase.HANDING_OVER, reason)

    def fall(self, reason: str) -> None:
        """The server said that somebody else may lead."""
        with self._lock:
            if self._phase not in (Phase.FALLEN, Phase.OVER):
                self._change(Phase.FALLEN, reason)

    def close(self) -> None:
        """Nothing of it runs any more."""
        with self._lock:
            self._look()
            if self._phase is not Phase.OVER:
                self._change(Phase.OVER, self.reason or "done")

    def __repr__(self) -> str:
        return f"<Term of {self.name!r}, token {self.token}, {self._phase.value}>"

    # -- inside, under the lock

    def _age(self) -> float:
        return self._clock.monotonic() - self._confirmed_at

    def _look(self) -> None:
        if self._phase not in (Phase.FALLEN, Phase.OVER) and self._age() >= TRUST * self.session_s:
            self._change(Phase.FALLEN, f"not confirmed for {TRUST:g} of the session of {self.session_s:g} s")

    def _change(self, phase: Phase, reason: str) -> None:
        self._phase = phase
        self.reason = self.reason or reason
        self._ending.set()
        if phase is Phase.FALLEN:
            self._on_fall()


class Career(Generic[Message]):
    """What a leader does, outside of Celery: subclass it and hand it to :func:`~.runner.lead`.

    The methods are called one after the other in one thread, per term: :meth:`inaugurate`, then
    :meth:`execute` again and again, then :meth:`hand_over`.
    """

    def inaugurate(self, token: int) -> None:
        """Take over. Give `token` along with every effect, and let what receives it refuse lower ones.

        An exception ends the term; the process stands for election again.
        """

    def execute(self, message: Message) -> bool:
        """Do one piece of work; return whether to go on. False resigns.

        :param message: what the source gave; None without a source.
        """
        # The one method that every career has to bring; the others have a meaning when left out.
        raise NotImplementedError(
            f"{type(self).__name__} has no execute(): say there what one piece of work is"
        )

    def hand_over(self) -> None:
        """Clean up. After a fall others may lead already; what checks tokens refuses what this writes."""
