"""Stands for an election, and keeps whoever does the work in office as long as it may be trusted.

Two threads: one renews the term and watches the clock, the other does the work of the term
(:meth:`Duties.serve`), which may block. When trust ends, the first one calls :meth:`Duties.abort`, and stands
again only when the work has really ended.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Protocol

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import ConfigurationError, NotElected
from celery_dq.leadership.career import TRUST, Phase, Term
from celery_dq.leadership.election import Election

__all__ = ["Duties", "Office"]

logger = logging.getLogger(__name__)

#: Renewals per session.
RENEWALS = 6
#: Seconds before standing again after something went wrong: at first, and after several failures; jitter is
#: added.
PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
#: Seconds a candidate waits at a time when nothing happens.
LONGEST_WAIT_S = 30.0


class Duties(Protocol):
    """What there is to do in office."""

    def floor(self) -> int:
        """The highest token known elsewhere; the next one will be above it. May raise OSError."""

    def serve(self, term: Term) -> None:
        """Inaugurate, execute while the term is firm, hand over when it ends; then return.

        Runs in a thread of its own. Returning before the term ends resigns.
        """

    def trust(self, term: Term, until: float) -> None:
        """The term is trusted until this monotonic time, unless this is called again."""

    def abort(self, term: Term) -> None:
        """The term has fallen: stop what runs, by force where there is one, and return at once."""


class Office:
    """One candidate and, at times, leader.

    :param grace_s: seconds that a successor waits after a predecessor that did not hand over; 0 (default)
        is right where effects are fenced.
    :param may_lead: asked before acceding; False lets others go first.
    """

    def __init__(
        self,
        election: Election,
        duties: Duties,
        *,
        grace_s: float = 0.0,
        clock: Clock | None = None,
        may_lead: Callable[[], bool] = lambda: True,
    ) -> None:
        self.election = election
        self._duties = duties
        self._grace_s = grace_s
        self._clock: Clock = clock or SystemClock()
        self._may_lead = may_lead
        self._term: Term | None = None
        self._closing = False
        self._bell = threading.Event()
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        #: The work of the present term has begun.
        self._serving = False
        #: The state of the connection has changed since the last renewal was sent.
        self._shaken = False
        #: What our last resignation said, while its answer has not come: whether all was at rest.
        self._owed: bool | None = None
        #: Our last term, if nothing of it and of all before it ran any more when it ended; else 0.
        self._rested = 0
        election.listen(self._hear)

    @property
    def term(self) -> Term | None:
        """The present term; None while somebody else leads."""
        return self._term

    @property
    def name(self) -> str:
        """What is led."""
        return self.election.name

    def open(self) -> None:
        """Volunteer: stand for election from now on, or again."""
        with self._lock:
            self._closing = False
            if self._thread is None:
                name = f"dq-office-{self.name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def resign(self, reason: str = "resigned") -> None:
        """Hand over in good order, and stand again behind the others."""
        term = self._term
        if term is not None:
            term.end(reason)
        self._bell.set()

    def close(self, timeout_s: float | None = None, reason: str = "closed") -> bool:
        """Hand over in good order and stand no more; returns whether that was done in time."""
        with self._lock:
            self._closing = True
            thread = self._thread
        self.resign(reason)
        self.election.wake()
        if thread is not None:
            thread.join(timeout_s)
            return not thread.is_alive()
        return True

    # -- the thread

    def _run(self) -> None:
        while True:
            while not self._closing:
                self._stand()
            self._withdraw()
            with self._lock:
                if self._closing:
                    self._thread = None
                    return

    def _stand(self) -> None:
        """One candidacy: until something changes, or to the end of a term."""
        try:
            if self._owed is not None:
                # Who is after us may be waiting for it, and for a grace that is not called for.
                self._give_up()
            if not self.election.stand():
                self._failures = 0
                if not self._closing:
                    self.election.wait(LONGEST_WAIT_S)
            elif self._may_lead():
                self._lead()
            else:
                self._leave(clean=False)
                self._pause()
        except Exception as error:
            self._lament(error)
            # First in line and unable to lead, we would stand in everybody's way.
            self._leave(clean=False)
            self._failures += 1
            self._pause()

    def _withdraw(self) -> None:
        """Stand no more. A candidate that is left behind would stand in everybody's way."""
        deadline = self._clock.monotonic() + self.election.session_s
        while True:
            try:
                self._give_up()
                return
            except Exception as error:
                if self._clock.monotonic() >= deadline:
                    logger.warning("The candidacy for %r ends with its session only: %s", self.name, error)
                    return
            self._bell.wait(PAUSE_S)
            self._bell.clear()

    def _lament(self, error: Exception) -> None:
        if isinstance(error, NotElected):
            logger.info("%s", error)
        elif isinstance(error, OSError):
            logger.warning("The election for %r: %s", self.name, error)
        elif isinstance(error, ConfigurationError):
            # It says what is wrong. Standing again is right: it may be mended where the server is.
            logger.error("The election for %r cannot be held: %s", self.name, error)
        else:
            logger.error("The candidacy for %r goes on after an error.", self.name, exc_info=error)

    def _pause(self) -> None:
        pause_s = min(PAUSE_S * 2 ** min(self._failures, 10), LONGEST_PAUSE_S)
        # What has rung for the term that is over is no reason to stand before the others.
        self._bell.clear()
        if not self._closing:
            self._bell.wait(pause_s * (1 + random.random()))

    def _lead(self) -> None:
        floor = self._duties.floor()
        sent_at = self._clock.monotonic()
        won = self.election.accede(floor, self._clock.wall())
        # That the predecessor was one of ours says nothing of the one before: it may have been interrupted
        # while it waited for that one.
        rested = won.clean or (won.former > 0 and won.former == self._rested)
        self._rested = 0
        term = self._term = Term(
            self.name, won.token, sent_at, self.election.session_s, self._clock, on_fall=self._bell.set
        )
        logger.info("Elected to lead %r, token %d.", self.name, won.token)
        served = threading.Event()
        self._serving = False
        try:
            self._tell_trust(term)
            if self._closing:
                term.end("closed")
            self._reign(term, 0.0 if rested else self._grace_s, sent_at, served)
        except Exception as error:
            # Whatever it was: nobody may follow while the work goes on.
            self._lament(error)
            term.fall("the office failed")
            self._abort(term)
        if self._serving:
            self._outlast(term, served)
        # Who has only waited in the grace knows no more of the predecessor than at the beginning.
        rested = rested or self._serving
        self._rested = term.token if rested else 0
        clean = term.trusted and rested
        term.close()
        self._term = None
        logger.info("The term of %r, token %d, is over: %s.", self.name, term.token, term.reason)
        self._failures = 0 if term.executed else self._failures + 1
        self._leave(clean)
        self._pause()

    def _reign(self, term: Term, grace_s: float, sent_at: float, served: threading.Event) -> None:
        """Renew the term until its work is done, or it has fallen."""
        renew_at = sent_at + term.session_s / RENEWALS
        grace_until = self._clock.monotonic() + grace_s
        while not served.is_set():
            now = self._clock.monotonic()
            if term.phase is Phase.FALLEN:
                logger.warning(
                    "The term of %r, token %d, has fallen: %s.", self.name, term.token, term.reason
                )
                self._abort(term)
                return
            if not self._serving:
                if term.ended:
                    return
                if now >= grace_until:
                    self._serve(term, served)
            if self._shaken or now >= renew_at:
                self._shaken = False
                renew_at = self._renew(term)
            wait_s = min(renew_at - self._clock.monotonic(), max(term.trust_left_s, 0.001))
            if not self._serving:
                wait_s = min(wait_s, max(grace_until - self._clock.monotonic(), 0.001))
            self._bell.wait(max(wait_s, 0.0))
            self._bell.clear()

    def _serve(self, term: Term, served: threading.Event) -> None:
        def serve() -> None:
            try:
                self._duties.serve(term)
            except Exception:
                logger.exception("The term of %r, token %d, ends with an error.", self.name, term.token)
            finally:
                term.end("its work is done")
                served.set()
                self._bell.set()

        threading.Thread(target=serve, name=f"dq-term-{self.name}", daemon=True).start()
        self._serving = True

    def _outlast(self, term: Term, served: threading.Event) -> None:
        """Wait for the end of the work of a term that has fallen, standing in nobody's way."""
        left = served.wait((1 - TRUST) * term.session_s)
        while not left:
            self._leave(clean=False)
            left = served.wait(term.session_s)

    def _abort(self, term: Term) -> None:
        try:
            self._duties.abort(term)
        # sys.exit() in a thread ends no more than the thread, whose candidate nobody would get past any more.
        except (Exception, SystemExit):
            logger.exception("What runs in the term of %r, token %d, was not stopped.", self.name, term.token)

    def _renew(self, term: Term) -> float:
        """Renew once; return the monotonic time of the next renewal."""
        sent_at = self._clock.monotonic()
        interval = term.session_s / RENEWALS
        try:
            self.election.renew()
        except NotElected as error:
            term.fall(str(error))
        except Exception as error:
            # An answer that is an error confirms nothing. Trust ends by itself.
            if self.election.suspended or not isinstance(error, OSError):
                term.suspend(True)
            logger.info("A renewal for %r was not confirmed: %s", self.name, error)
            return sent_at + interval / 4
        else:
            if term.confirmed(sent_at):
                term.suspend(self.election.suspended)
                self._tell_trust(term)
        return sent_at + interval

    def _hear(self) -> None:
        """The connection has broken, or is whole again, perhaps without us. Must not wait."""
        term = self._term
        if term is not None and self.election.suspended:
            term.suspend(True)
        # That it is whole is no leave to start anything: only a renewal is.
        self._shaken = True
        self._bell.set()

    def _tell_trust(self, term: Term) -> None:
        self._duties.trust(term, self._clock.monotonic() + term.trust_left_s)

    def _leave(self, clean: bool) -> None:
        # What was at rest is so until we lead again, which we do not before this is told.
        self._owed = clean or bool(self._owed)
        try:
            self._give_up()
        except Exception as error:
            logger.info("The resignation from %r was not confirmed: %s", self.name, error)
            if not isinstance(error, OSError):
                self._owed = None  # that was an answer, and the same one would come again

    def _give_up(self) -> None:
        self.election.resign(clean=bool(self._owed))
        self._owed = None
