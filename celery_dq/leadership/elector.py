"""Takes part in an election, with ZooKeeper or Redis, and leads a term for as long as the term is trusted.

There are two threads. The elector's thread renews the term and watches the clock. The term's thread does the
work (:meth:`LeaderCallbacks.serve`), which may block. When trust ends, the elector's thread calls
:meth:`LeaderCallbacks.abort`. It becomes a candidate again only after the work has ended.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from celery_dq.clock import Clock, SystemClock
from celery_dq.daemon_threads import start_daemon
from celery_dq.errors import ConfigurationError, NotElected, ZooKeeperUnreachable
from celery_dq.leadership.career import TRUST, Phase, Term
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger

__all__ = ["LeaderCallbacks", "LeaderElector", "ElectionWon", "Election", "Leader"]

logger = shown_logger(__name__)


class ElectionWon(NamedTuple):
    """The result of an election that this candidate has won.

    Attributes:
        token: The fencing token, above all earlier ones.
        clean: Whether the predecessor has reported that none of its work runs, or there was no predecessor.
        former: The predecessor's token if the predecessor was this same candidate; else 0.
    """

    token: int
    clean: bool
    former: int


class Leader(NamedTuple):
    """The current leader.

    Attributes:
        who: Name of the candidate.
        token: Fencing token of its term.
        since: Time of its election, seconds since 1970.
    """

    who: str
    token: int
    since: float


class Election(Protocol):
    """One candidate for one leadership. Used by one thread at a time.

    Every method except :meth:`wait` sends requests to the server and returns within a bounded time. Without
    an answer, it raises ``OSError`` (:exc:`~celery_dq.errors.ZooKeeperUnreachable`, or a wrapped error of
    redis-py); then the request may have been carried out.

    Attributes:
        name: Name of the leadership.
        who: Name of this candidate; no other candidate ever has the same name.
    """

    name: str
    who: str

    @property
    def outage(self) -> Outage:
        """Whether the server answers; the candidates of one connection share this object."""

    @property
    def session_s(self) -> float:
        """Seconds for which the server keeps a silent leader."""

    @property
    def suspended(self) -> bool:
        """Whether the connection is known to be broken."""

    def add_listener(self, wake_event: Callable[[], None]) -> None:
        """Call `wake_event` when :attr:`suspended` changes outside of a request, or the session ends.

        `wake_event` is called in any thread and must not block. It is called only while this object is a
        candidate or the leader.
        """

    def become_candidate(self) -> bool:
        """Become or stay a candidate; return whether no other candidate is ahead."""

    def wait(self, timeout_s: float) -> None:
        """Wait until :meth:`become_candidate` may return another value, at most `timeout_s` seconds."""

    def wake(self) -> None:
        """End a :meth:`wait` in another thread, if that wait may be long."""

    def accept(self, floor: int, since: float) -> ElectionWon:
        """Become the leader with one conditional write.

        Args:
            floor: The new token is above this number, too.
            since: Wall time, for display.

        Raises:
            NotElected: Another candidate was elected in the meantime.
        """

    def renew(self) -> None:
        """Stay the leader with one conditional write.

        Raises:
            NotElected: This candidate does not lead any more.
        """

    def resign(self, clean: bool) -> None:
        """End the leadership and the candidacy.

        Args:
            clean: Whether no work of this term runs any more, so that the successor need not wait.
        """

    def candidates(self) -> list[str]:
        """Return the names of all living candidates, the leader first; callable from any thread."""

    def leader(self) -> Leader | None:
        """Return the current leader, as far as the server knows."""


#: Renewals per session timeout.
RENEWALS = 6
#: Seconds before the next candidacy after a failure: the first and the longest pause; jitter is added.
PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
#: The longest pause after terms whose work has failed at once.
LONGEST_REST_S = 15.0
#: Maximum seconds of one wait as a candidate.
LONGEST_WAIT_S = 30.0


class LeaderCallbacks(Protocol):
    """The work of a leader. By default it needs no end of trust, and is not aborted."""

    def floor(self) -> int:
        """Return the highest token known outside of the election and of this candidate's terms.

        The next token is above it, also where a server has lost its data.

        Raises:
            OSError: The token could not be read.
        """

    def serve(self, term: Term) -> None:
        """Do the work of one term, and return when the term has ended and nothing of it runs.

        Runs in the term's thread. To return before the term ends means to resign.
        """

    def trust(self, term: Term, until: float) -> None:
        """Receive the monotonic time until which the term is trusted; called again after each renewal."""
        return

    def abort(self, term: Term) -> None:
        """Stop the work of a term that has fallen, by force if necessary; return at once."""
        return


class LeaderElector:
    """One candidate of an election, and the leader after it has won.

    Args:
        election: The election.
        duties: The work of the leader.
        grace_s: Seconds to wait after a predecessor that did not hand over; 0 (default) is right if effects
            are fenced.
        clock: Wall and monotonic time.
        may_lead: Called before an election is accepted; False lets other candidates lead first.
    """

    def __init__(
        self,
        election: Election,
        duties: LeaderCallbacks,
        *,
        grace_s: float = 0.0,
        clock: Clock | None = None,
        may_lead: Callable[[], bool] = lambda: True,
    ) -> None:
        self.election = election
        self._callbacks = duties
        self._grace_s = grace_s
        self._clock: Clock = clock or SystemClock()
        self._may_lead = may_lead
        self._term: Term | None = None
        #: The highest token of this candidate's terms.
        self._highest = 0
        self._closing = False
        self._wake_event = threading.Event()
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        #: Whether the work of the current term has started, and whether it has raised an error.
        self._serving = self._failed = False
        #: Seconds of the last pause.
        self._paused_s = 0.0
        #: Whether the state of the connection has changed since the last renewal was sent.
        self._session_changed = False
        #: The `clean` value of a resignation without an answer; None if no resignation is pending.
        self._resignation_pending: bool | None = None
        #: The token of this candidate's last term, if no work of it or of an earlier term ran at its end;
        #: else 0.
        self._clean_term = 0
        #: Types of the errors that were logged since the last answer of the election.
        self._lamented: set[type[Exception]] = set()
        election.add_listener(self._on_session_change)

    @property
    def term(self) -> Term | None:
        """The current term; None while this candidate does not lead."""
        return self._term

    @property
    def name(self) -> str:
        """The name of the leadership."""
        return self.election.name

    def open(self) -> None:
        """Become a candidate, also after :meth:`close`."""
        with self._lock:
            self._closing = False
            if self._thread is None:
                self._thread = start_daemon(self._run, f"dq-elector-{self.name}")

    def resign(self, reason: str = "resigned") -> None:
        """End the current term with a hand-over, and become a candidate behind the others."""
        term = self._term
        if term is not None:
            term.end(reason)
        self._wake_event.set()

    def close(self, timeout_s: float | None = None, reason: str = "closed") -> bool:
        """End the current term with a hand-over, and end the candidacy.

        Args:
            timeout_s: Maximum seconds to wait; None means without a limit.
            reason: The reason of the term's end, for logs.

        Returns:
            Whether the candidacy has ended in time.
        """
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
                self._become_candidate()
            self._withdraw()
            with self._lock:
                if self._closing:
                    self._thread = None
                    return

    def _become_candidate(self) -> None:
        """Take part in the election once: until the line of candidates changes, or to the end of a term."""
        try:
            if self._resignation_pending is not None:
                # Without the pending resignation, the successor would wait for the session and for a grace.
                self._give_up()
            if not self.election.become_candidate():
                self._failures = 0
                self._answered()
                if not self._closing:
                    self.election.wait(LONGEST_WAIT_S)
            elif self._may_lead():
                self._lead()
            else:
                self._leave(clean=False)
                self._pause()
        except Exception as error:
            self._report_lost(error)
            # A candidate that is first in line and unable to lead would block all others.
            self._leave(clean=False)
            self._failures += 1
            self._pause()

    def _withdraw(self) -> None:
        """End the candidacy; a candidate that is left in the line would block all others."""
        deadline = self._clock.monotonic() + self.election.session_s
        while True:
            try:
                self._give_up()
                return
            except Exception as error:
                if self._clock.monotonic() >= deadline:
                    logger.log(
                        logging.INFO if self.election.outage.lasts else logging.WARNING,
                        "The candidacy for %r could not be withdrawn (%s); the next leader may have to wait "
                        "%g s, until the candidate's session ends.",
                        self.name,
                        error,
                        self.election.session_s,
                        extra={"event": "candidacy_not_withdrawn"},
                    )
                    return
            self._wake_event.wait(PAUSE_S)
            self._wake_event.clear()

    def _report_lost(self, error: Exception) -> None:
        if type(error) in self._lamented:
            return  # the same error follows from every attempt
        if not isinstance(error, NotElected):
            self._lamented.add(type(error))
        if isinstance(error, NotElected):
            logger.info(
                "Candidate %s did not win the election for %r (%s); it tries again.",
                self.election.who,
                self.name,
                error,
                extra={"event": "election_not_won"},
            )
        elif isinstance(error, OSError):
            # The first candidate logs this, for all candidates of the same connection.
            self.election.outage.began(
                "The election for %r does not answer (%s); this process cannot be elected until it does, and "
                "tries again.",
                self.name,
                error,
            )
        elif isinstance(error, ConfigurationError):
            # The candidate tries again, because the settings of the server may be mended.
            logger.error(
                "The election for %r cannot be held (%s); this candidate tries again.",
                self.name,
                error,
                extra={"event": "election_misconfigured"},
            )
        else:
            logger.error(
                "The candidacy for %r continues after an error.",
                self.name,
                exc_info=error,
                extra={"event": "candidacy_failed"},
            )

    def _answered(self) -> None:
        self._lamented.clear()
        self.election.outage.over("The election for %r answers again.", self.name)

    def _pause(self, longest_s: float = LONGEST_PAUSE_S) -> None:
        pause_s = self._paused_s = min(PAUSE_S * 2 ** min(self._failures, 10), longest_s)
        # A wake-up for the term that is over must not shorten the pause, so that other candidates come first.
        self._wake_event.clear()
        if not self._closing:
            self._wake_event.wait(pause_s * (1 + random.random()))

    def _lead(self) -> None:
        floor = max(self._callbacks.floor(), self._highest)
        sent_at = self._clock.monotonic()
        won = self.election.accept(floor, self._clock.wall())
        self._highest = won.token
        self._answered()
        # A predecessor of this same candidate may have ended during its grace, while work of an earlier term
        # was still running.
        was_clean = won.clean or (won.former > 0 and won.former == self._clean_term)
        self._clean_term = 0
        term = self._term = Term(
            self.name, won.token, sent_at, self.election.session_s, self._clock, on_fall=self._wake_event.set
        )
        logger.info(
            "Candidate %s was elected to lead %r, token %d.",
            self.election.who,
            self.name,
            won.token,
            extra={"event": "leader_elected"},
        )
        served = threading.Event()
        self._serving = self._failed = False
        try:
            self._report_trust(term)
            if self._closing:
                term.end("closed")
            self._lead_term(term, 0.0 if was_clean else self._grace_s, sent_at, served)
        except Exception as error:
            # After any error, the work must end before another candidate may lead.
            self._report_lost(error)
            term.fall("the elector failed")
            self._abort(term)
        if self._serving:
            self._wait_for_expiry(term, served)
        # A term that ended during its grace has not found out whether the predecessor's work has ended.
        was_clean = was_clean or self._serving
        self._clean_term = term.token if was_clean else 0
        clean = term.is_trusted and was_clean
        term.close()
        self._term = None
        logger.info(
            "The term of %r, token %d, is over: %s.",
            self.name,
            term.token,
            term.reason,
            extra={"event": "term_over"},
        )
        # Work that fails soon rests, up to as long as it has lasted before.
        worked = term.executed and (
            not self._failed or self._clock.monotonic() - sent_at > max(self._paused_s, PAUSE_S)
        )
        self._failures = 0 if worked else self._failures + 1
        self._leave(clean)
        self._pause(LONGEST_REST_S if self._failed else LONGEST_PAUSE_S)

    def _lead_term(self, term: Term, grace_s: float, sent_at: float, served: threading.Event) -> None:
        """Renew the term until its work is done, or it has fallen."""
        renew_at = sent_at + term.session_s / RENEWALS
        grace_until = self._clock.monotonic() + grace_s
        while not served.is_set():
            now = self._clock.monotonic()
            if term.phase is Phase.FALLEN:
                # An outage has its own warning, and ends the terms of all queues.
                logger.log(
                    logging.INFO if self.election.outage.lasts else logging.WARNING,
                    "The term of %r, token %d, has fallen: %s. Its work is stopped, and another candidate "
                    "may lead.",
                    self.name,
                    term.token,
                    term.reason,
                    extra={"event": "term_fallen"},
                )
                self._abort(term)
                return
            if not self._serving:
                if term.ended:
                    return
                if now >= grace_until:
                    self._serve(term, served)
            if self._session_changed or now >= renew_at:
                self._session_changed = False
                renew_at = self._renew(term)
            wait_s = min(renew_at - self._clock.monotonic(), max(term.trust_left_s, 0.001))
            if not self._serving:
                wait_s = min(wait_s, max(grace_until - self._clock.monotonic(), 0.001))
            self._wake_event.wait(max(wait_s, 0.0))
            self._wake_event.clear()

    def _serve(self, term: Term, served: threading.Event) -> None:
        def serve() -> None:
            try:
                self._callbacks.serve(term)
            except ZooKeeperUnreachable as error:
                self._failed = True
                logger.warning(
                    "The work in the term of %r, token %d, has ended: its ZooKeeper does not answer (%s). "
                    "This process becomes a candidate again after a pause unless it is stopping.",
                    self.name,
                    term.token,
                    error,
                    extra={"event": "term_failed"},
                )
            except Exception:
                self._failed = True
                logger.exception(
                    "The work in the term of %r, token %d, raised an error. The term ends; this process "
                    "becomes a candidate again after a pause unless it is stopping.",
                    self.name,
                    term.token,
                    extra={"event": "term_failed"},
                )
            finally:
                term.end("its work is done")
                served.set()
                self._wake_event.set()

        start_daemon(serve, f"dq-term-{self.name}")
        self._serving = True

    def _wait_for_expiry(self, term: Term, served: threading.Event) -> None:
        """Wait for the end of a fallen term's work, and keep this candidate out of the line meanwhile."""
        left = served.wait((1 - TRUST) * term.session_s)
        while not left:
            self._leave(clean=False)
            left = served.wait(term.session_s)

    def _abort(self, term: Term) -> None:
        try:
            self._callbacks.abort(term)
        # sys.exit() would end only this thread, and its candidate would block all others.
        except (Exception, SystemExit):
            logger.exception(
                "The callback that stops the work in the term of %r, token %d, raised an error. The work may "
                "continue while another candidate leads.",
                self.name,
                term.token,
                extra={"event": "abort_failed"},
            )

    def _renew(self, term: Term) -> float:
        """Renew once; return the monotonic time of the next renewal."""
        sent_at = self._clock.monotonic()
        interval = term.session_s / RENEWALS
        try:
            self.election.renew()
        except NotElected as error:
            term.fall(str(error))
        except Exception as error:
            # An error confirms nothing. Without a confirmed renewal, trust ends by itself.
            if self.election.suspended or not isinstance(error, OSError):
                term.suspend(True)
            logger.info(
                "A renewal of the term of %r, token %d, was not confirmed (%s). It is tried again; without a "
                "renewal, the term falls in %.1f s.",
                self.name,
                term.token,
                error,
                max(term.trust_left_s, 0.0),
                extra={"event": "term_renewal_failed"},
            )
            return sent_at + interval / 4
        else:
            self._answered()
            if term.confirmed(sent_at):
                term.suspend(self.election.suspended)
                self._report_trust(term)
        return sent_at + interval

    def _on_session_change(self) -> None:
        """Handle a change of the connection's state; called in the connection's thread, must not block."""
        term = self._term
        if term is not None and self.election.suspended:
            term.suspend(True)
        # A restored connection does not make the term firm again: only a confirmed renewal does.
        self._session_changed = True
        self._wake_event.set()

    def _report_trust(self, term: Term) -> None:
        self._callbacks.trust(term, self._clock.monotonic() + term.trust_left_s)

    def _leave(self, clean: bool) -> None:
        # `clean` stays true until the next term, which does not begin before this resignation is confirmed.
        self._resignation_pending = clean or bool(self._resignation_pending)
        try:
            self._give_up()
        except Exception as error:
            logger.info(
                "The resignation from %r was not confirmed (%s); it is sent again before the next candidacy.",
                self.name,
                error,
                extra={"event": "resignation_failed"},
            )
            if not isinstance(error, OSError):
                self._resignation_pending = (
                    None  # the server has answered, and would give the same answer again
                )

    def _give_up(self) -> None:
        self.election.resign(clean=bool(self._resignation_pending))
        self._resignation_pending = None
