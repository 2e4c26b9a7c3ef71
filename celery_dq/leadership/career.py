"""The terms of a leader, and the rules of how long a term may be trusted. No library, no I/O.

A process that takes part in an election is a *candidate* until it is elected. Each won election begins a
*term*, which has a *fencing token*: a number greater than that of every earlier term. A term goes through
these phases, never back::

    INAUGURATING ──inaugurated──▶ EXECUTING ──end──▶ HANDING_OVER ──close──▶ OVER
          │                           │                   │                    ▲
          └───────────────────── trust ends ──────────────┘                    │
                                      ▼                                        │
                                   FALLEN ───────────────close─────────────────┘

* *INAUGURATING*: the leader takes over from its predecessor and executes no message yet.
* *EXECUTING*: messages are executed while the term is *firm*.
* *HANDING_OVER*: the leader steps down; a running message may finish, and no new message is taken.
* *FALLEN*: trust has ended. Running work must be stopped; its effects are refused where tokens are checked.
* *OVER*: no work of this term runs any more.

**Trust.** A leader cannot see that it was replaced; it can only know that it was not replaced yet. The server
keeps a silent leader for one session. A confirmed renewal that was *sent* at time t therefore proves that no
other candidate leads before t + session. So the term is

* *firm* until t + 0.4 session: new work may start;
* *trusted* until t + 0.6 session: running work may continue;
* fallen after that, even if a later renewal succeeds: the rest of the session is left for stopping the work.

A connection that is known to be broken makes a term infirm at once. All times are from a monotonic clock that
continues while the machine is suspended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from celery_dq.clock import Clock

__all__ = ["DOUBT", "TRUST", "Career", "Phase", "Term"]

#: A term is firm for this share of the session after the last confirmed renewal was sent.
DOUBT = 0.4
#: A term is trusted for this share of the session after the last confirmed renewal was sent.
TRUST = 0.6

Message = TypeVar("Message")


class Phase(Enum):
    """The phase of a term; see the module."""

    INAUGURATING = "inaugurating"
    EXECUTING = "executing"
    HANDING_OVER = "handing over"
    FALLEN = "fallen"
    OVER = "over"


#: A module global is faster to read than a member of the enumeration.
_EXECUTING = Phase.EXECUTING
#: The phases after which a term executes no new message.
ENDING = (Phase.HANDING_OVER, Phase.FALLEN, Phase.OVER)


class Term:
    """One term of a leader. Thread-safe.

    Args:
        name: Name of the leadership.
        token: The fencing token, above all earlier ones.
        sent_at: Monotonic time at which the write that won the election was sent.
        session_s: Seconds for which the server keeps the session of a silent leader.
        clock: Wall and monotonic time.
        on_fall: Called when the term falls, in the thread that notices it; it must not block.

    Attributes:
        since: Wall time of the election, for display.
        reason: Why the term ended; "" until it ends.
        executed: Whether the term has reached the phase EXECUTING.
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
        self.since = clock.wall()
        self.reason = ""
        self.executed = False
        self._clock = clock
        self._on_fall = on_fall
        self._confirmed_at = sent_at
        self._doubt_at = sent_at + DOUBT * session_s
        self._suspended = False
        self._phase = Phase.INAUGURATING
        self._lock = threading.Lock()
        self._ending = threading.Event()

    # -- state

    @property
    def phase(self) -> Phase:
        """The current phase. The term falls when this property is read after trust has ended."""
        if self._age() < TRUST * self.session_s:
            return self._phase  # read for every message, so without the lock if possible
        with self._lock:
            self._look()
            return self._phase

    @property
    def is_firm(self) -> bool:
        """Whether new work may start."""
        # Read several times for every message. A term that is not in doubt cannot have lost trust, so there
        # is no need to check for its fall.
        return self._phase is _EXECUTING and not self._suspended and self._clock.monotonic() < self._doubt_at

    @property
    def is_running(self) -> bool:
        """Whether a message that was taken before the term began to end may start now."""
        with self._lock:
            self._look()
            sure = not self._suspended and self._clock.monotonic() < self._doubt_at
            return sure and self._phase in (Phase.EXECUTING, Phase.HANDING_OVER)

    @property
    def is_trusted(self) -> bool:
        """Whether no other candidate can lead yet, so that running work may continue."""
        with self._lock:
            self._look()
            return self._phase not in (Phase.FALLEN, Phase.OVER)

    @property
    def trust_left_s(self) -> float:
        """Seconds until trust ends without another confirmed renewal; negative after trust has ended."""
        return TRUST * self.session_s - self._age()

    @property
    def ended(self) -> bool:
        """Whether the term is ending or has ended; see :attr:`reason`."""
        return self.phase in ENDING

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the term is ending, at most `timeout_s` seconds; return whether it is."""
        if timeout_s is None or timeout_s > 0:
            self._ending.wait(timeout_s)
        return self.ended

    # -- events

    def confirmed(self, sent_at: float) -> bool:
        """Record a confirmed renewal. A confirmation after the end of trust changes nothing.

        Args:
            sent_at: Monotonic time at which the renewal was sent.

        Returns:
            Whether the term is trusted.
        """
        with self._lock:
            self._look()
            if self._phase in (Phase.FALLEN, Phase.OVER):
                return False
            self._confirmed_at = max(self._confirmed_at, sent_at)
            self._doubt_at = self._confirmed_at + DOUBT * self.session_s
            return True

    def suspend(self, suspended: bool) -> None:
        """Record whether the connection to the server is known to be broken."""
        self._suspended = suspended

    def inaugurated(self) -> bool:
        """Record the end of the inauguration; return False if the term has ended in the meantime."""
        with self._lock:
            self._look()
            if self._phase is Phase.INAUGURATING:
                self._phase = Phase.EXECUTING
                self.executed = True
            return self._phase is Phase.EXECUTING

    def end(self, reason: str) -> None:
        """Step down: no new work starts."""
        with self._lock:
            self._look()
            if self._phase not in ENDING:
                self._change(Phase.HANDING_OVER, reason)

    def fall(self, reason: str) -> None:
        """Let the term fall at once, because another candidate may lead."""
        with self._lock:
            if self._phase not in (Phase.FALLEN, Phase.OVER):
                self._change(Phase.FALLEN, reason)

    def close(self) -> None:
        """Record that no work of the term runs any more."""
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
    """The work of a leader outside of Celery; subclass it and pass it to :class:`~.runner.Runner`.

    In each term, one thread calls :meth:`inaugurate`, then :meth:`execute` repeatedly, then
    :meth:`hand_over`.

    Attributes:
        term: The current or last term; None before the first one. A long :meth:`execute` asks ``term.ended``
            whether the term is ending, or waits with ``term.wait(seconds)`` instead of ``time.sleep``.
    """

    term: Term | None = None

    def inaugurate(self, token: int) -> None:
        """Take over the leadership.

        Send `token` with every effect, and let the receiver refuse lower tokens. An exception ends the term,
        and the process becomes a candidate again.
        """

    def execute(self, message: Message) -> bool:
        """Do one piece of work.

        An exception ends the term after the message was given back to its source, and the process becomes a
        candidate again. A message that always raises comes back each time, so catch its exception.

        Args:
            message: The message from the source; None without a source.

        Returns:
            Whether to continue; False resigns.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no execute(): define it to do one piece of work"
        )

    def hand_over(self) -> None:
        """Clean up at the end of a term.

        After a fall, another candidate may lead already; a receiver that checks tokens then refuses the
        effects of this method.
        """
