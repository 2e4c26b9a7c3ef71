"""The leaderships of one worker's singleton queues, as the transport sees them, and the work of a term.

A term of a queue has these steps:

1. The queue is *fenced* with the token, so that messages claimed by older terms return to their places.
2. The user's ``inaugurate`` runs.
3. The transport sees the term and consumes the queue.
4. The term ends. The transport releases waiting messages, and the running message ends or is killed.
5. The user's ``hand_over`` runs, and the next candidate may lead.

Leaderships are balanced over workers: two candidates for the same queues never differ by more than one. Each
worker decides for itself from the lines of candidates. It compares itself with one other candidate at a time,
and counts only the queues for which both are candidates. A worker that leads two queues more than another one
resigns from one queue at a time. A worker that is first in line and leads more queues than another candidate
lets the other one lead. If the candidates cannot be read, no worker yields. While nothing changes, a worker
reads the lines less and less often.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import Fenced
from celery_dq.leadership.career import Career, Phase, Term
from celery_dq.leadership.elector import Election, LeaderElector
from celery_dq.options.sections import SingletonOptions
from celery_dq.outage import Outage
from celery_dq.protocols import SingletonConsumer
from celery_dq.shown import shown_logger
from celery_dq.singleton.guard import Guard

logger = shown_logger(__name__)

#: Minimum seconds between two checks of the balance by a worker; up to the same time is added at random.
BALANCE_EVERY_S = 2.0
#: Maximum seconds between two readings of lines that do not change.
LONGEST_PAUSE_S = 32.0
#: A worker that takes one queue after the other reads the lines once in so many seconds.
FRESH_S = 0.5


class CandidateLines(Protocol):
    """Reads the candidates for several queues; several threads may call it."""

    @property
    def changed(self) -> bool:
        """Whether a line has changed since the last reading, as far as is known without a request."""

    def read(self, queues: Collection[str]) -> dict[str, list[str]]:
        """Return the names of all living candidates for each queue, the leader first."""


class Candidate(Protocol):
    """This worker's candidate for one queue.

    Attributes:
        who: Its name.
    """

    who: str


class Candidacy(Protocol):
    """The candidate of one worker for one queue; see :class:`~celery_dq.leadership.elector.LeaderElector`."""

    @property
    def term(self) -> object | None:
        """The current term; None while this candidate does not lead."""

    @property
    def election(self) -> Candidate:
        """The election of the candidate."""


class Balancer:
    """Decides whether a worker should take or yield a leadership, for balance.

    Args:
        electors: The candidates of this worker, by queue; may grow.
        clock: Monotonic time.
        lines: Reads the lines of candidates.
    """

    def __init__(self, electors: Mapping[str, Candidacy], clock: Clock, lines: CandidateLines) -> None:
        self._electors = electors
        self._clock = clock
        self._reader = lines
        self._reading = threading.Lock()
        #: The last reading, and its monotonic time.
        self._known: dict[str, list[str]] = {}
        self._read_at = -math.inf
        #: What the last check of the balance saw, and the seconds until the lines are read again.
        self._seen: tuple[set[str], dict[str, list[str]]] = set(), {}
        self._pause_s = 0.0
        self._look_at = clock.monotonic() + BALANCE_EVERY_S
        self._lock = threading.Lock()
        #: The queue that this worker should yield by the last check; "" after its term was notified.
        self._surplus = ""
        #: Monotonic time at which this worker last let other candidates lead, by queue.
        self._declined_at: dict[str, float] = {}

    def may_take(self, queue: str) -> bool:
        """Whether this worker may lead `queue` although other candidates may lead fewer queues.

        A worker that has let the others lead, and is first in line again, takes the queue, because no other
        candidate did.
        """
        own_queues = self._own_queues()
        now = self._clock.monotonic()
        if own_queues and now - self._declined_at.pop(queue, float("-inf")) > BALANCE_EVERY_S:
            lines = self._lines(FRESH_S)
            if any(self._lead_over(other, lines, own_queues) > 0 for other in self._others(queue, lines)):
                self._declined_at[queue] = now
                return False
        return True

    def should_yield(self, queue: str) -> bool:
        """Whether this worker should yield `queue` to a candidate that leads two queues fewer.

        It returns True for at most one queue per check.
        """
        # Do not wait while another term checks the balance: this term must watch its own end.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            now = self._clock.monotonic()
            if now >= self._look_at:
                self._look_at = now + BALANCE_EVERY_S * (1 + random.random())
                self._surplus = self._find_surplus()
            if self._surplus != queue:
                return False
            self._surplus = ""
            return True
        finally:
            self._lock.release()

    def _own_queues(self) -> set[str]:
        return {name for name, elector in list(self._electors.items()) if elector.term is not None}

    def _find_surplus(self) -> str:
        """Return an own queue for which a candidate leads two queues fewer; "" if there is none."""
        own_queues = self._own_queues()
        if len(own_queues) < 2:
            return ""
        if own_queues != self._seen[0] or self._reader.changed:
            self._pause_s = 0.0
        lines = self._lines(self._pause_s)
        seen, self._seen = self._seen, (own_queues, lines)
        if seen == self._seen:
            self._pause_s = min(max(2 * self._pause_s, BALANCE_EVERY_S), LONGEST_PAUSE_S)
        found = [
            queue
            for queue in own_queues
            if any(self._lead_over(other, lines, own_queues) > 1 for other in self._others(queue, lines))
        ]
        # Chosen at random: a fixed choice could move one queue in a circle from worker to worker.
        return random.choice(found) if found else ""

    def _lines(self, max_age_s: float) -> dict[str, list[str]]:
        """Return the workers in line for each of this worker's queues, the leader first; {} if unknown.

        Args:
            max_age_s: Seconds for which the last reading counts.
        """
        with self._reading:
            if self._clock.monotonic() - self._read_at >= max_age_s:
                try:
                    found = self._reader.read(list(self._electors))
                    self._known = {queue: list(map(worker_of, line)) for queue, line in found.items()}
                    self._read_at = self._clock.monotonic()
                # No error of the server, or in another candidate's data, may end a term.
                except Exception as error:
                    logger.debug("The candidates could not be read (%s: %s).", type(error).__name__, error)
                    return {}
            return self._known

    def _others(self, queue: str, lines: Mapping[str, list[str]]) -> set[str]:
        return set(lines.get(queue, ())) - {worker_of(self._electors[queue].election.who)}

    def _lead_over(self, other: str, lines: Mapping[str, list[str]], own_queues: set[str]) -> int:
        """Return how many queues more than `other` this worker leads, of those that both could lead."""
        shared = [name for name, line in lines.items() if other in line]
        theirs = sum(lines[name][0] == other for name in shared)
        return sum(name in own_queues for name in shared) - theirs


def worker_of(who: str) -> str:
    """Return the worker of a candidate: the candidate's name without the unique suffix."""
    return who.rpartition(":")[0]


#: Seconds between two checks of a message that must end.
LOOK_S = 0.01
#: Seconds between two checks of the broker.
LOOK_OUT_S = 0.5
#: Seconds between two attempts to reach the broker.
PAUSE_S = 0.2


class Fence(Protocol):
    """The part of a broker that refuses old tokens."""

    def epoch(self, queue: str) -> int:
        """Return the current token of a queue; 0 if there is none.

        Raises:
            OSError: The broker does not answer.
        """

    def raise_to(self, queue: str, token: int) -> int:
        """Raise the current token to `token`, and requeue the messages of older terms.

        Returns:
            The current token after the call; it is above `token` if a later leader has raised it.

        Raises:
            OSError: The broker does not answer.
        """


class LeadershipReport(NamedTuple):
    """The role of this worker for one queue.

    Attributes:
        queue: Name of the queue.
        leads: Whether this worker leads the queue.
        token: Fencing token of the current term; 0 without a term.
        since: Wall time of the election; 0 without a term.
        phase: Phase of the term, or ``standing by``.
        who: Name of the candidate.
    """

    queue: str
    leads: bool
    token: int
    since: float
    phase: str
    who: str


class WorkerLeaderships:
    """All singleton queues that this worker may lead.

    The transport uses it as :class:`celery_dq.protocols.Leaderships`.

    Args:
        sections: The options of each singleton queue.
        elect: Creates the candidate for a queue.
        fence: The broker's fence; None if the broker cannot refuse tokens.
        guard: Kills the process that runs a message after the end of its term.
        careers: The user's careers, by queue.
        kills: Whether the guard can kill a running message without killing this process.
        lines: Reads the lines of candidates, for the balance of leaderships.
        clock: Wall and monotonic time.
    """

    def __init__(
        self,
        sections: Mapping[str, SingletonOptions],
        elect: Callable[[str], Election],
        fence: Fence | None,
        guard: Guard,
        *,
        careers: Mapping[str, Career[Any]] | None = None,
        kills: bool,
        lines: CandidateLines,
        clock: Clock | None = None,
    ) -> None:
        self._sections = dict(sections)
        self._elect = elect
        self._fence = fence
        self._guard = guard
        self._careers = dict(careers or {})
        self._kills = kills
        self._clock: Clock = clock or SystemClock()
        self._electors: dict[str, LeaderElector] = {}
        self._balancer = Balancer(self._electors, self._clock, lines)
        self._consumers: dict[str, SingletonConsumer] = {}
        self._listeners: list[Callable[[], None]] = []

    # -- candidacies

    def volunteer(self, queue: str) -> None:
        """Become a candidate for the leadership of `queue`."""
        if queue not in self._electors:
            duties = QueueDuties(self, self._sections[queue], self._fence, self._guard, self._kills)
            grace_s = self._sections[queue].grace_us / 1e6
            elector = LeaderElector(
                self._elect(queue),
                duties,
                grace_s=grace_s,
                clock=self._clock,
                may_lead=lambda: self._balancer.may_take(queue),
            )
            self._electors[queue] = elector
        self._electors[queue].open()

    def resign(self, queue: str, reason: str) -> None:
        """Hand `queue` over to the next candidate, and become a candidate behind the others."""
        elector = self._electors.get(queue)
        if elector is not None:
            elector.resign(reason)

    def withdraw(self, queue: str) -> None:
        """Hand `queue` over and end the candidacy until :meth:`volunteer` is called; does not wait."""
        elector = self._electors.get(queue)
        if elector is not None:
            elector.close(0, "the worker does not consume the queue any more")

    def close(self, timeout_s: float) -> bool:
        """Hand over all queues and end the candidacies.

        Args:
            timeout_s: Maximum seconds to wait, over all queues.

        Returns:
            Whether all queues were handed over in time.
        """
        deadline = self._clock.monotonic() + timeout_s
        for elector in self._electors.values():
            elector.close(0, "the worker stops")
        all_over = True
        for elector in self._electors.values():
            left_s = max(deadline - self._clock.monotonic(), 0.0)
            if not elector.close(left_s):
                all_over = False
                if timeout_s:
                    logger.warning(
                        "The leadership of %r was not handed over within %g s; its successor waits until the "
                        "session of this worker ends.",
                        elector.name,
                        timeout_s,
                        extra={"event": "handover_timed_out"},
                    )
        return all_over

    def report(self) -> list[LeadershipReport]:
        """Return the role of this worker for each queue for which it is a candidate."""
        rows = []
        for name, elector in sorted(self._electors.items()):
            term = elector.term
            if term is None:
                rows.append(LeadershipReport(name, False, 0, 0.0, "standing by", elector.election.who))
            else:
                who = elector.election.who
                rows.append(
                    LeadershipReport(name, term.is_trusted, term.token, term.since, term.phase.value, who)
                )
        return rows

    def career(self, queue: str) -> Career[Any] | None:
        """Return the user's career for `queue`, or None."""
        return self._careers.get(queue)

    # -- called by the transport

    def is_singleton(self, queue: str) -> bool:
        """Whether the queue is a singleton queue."""
        return queue in self._sections

    def term_token(self, queue: str) -> int:
        """Return the token of this worker's term while its messages may be executed; else 0."""
        term = self._term(queue)
        return term.token if term is not None and term.phase is Phase.EXECUTING else 0

    def is_current(self, queue: str, token: int) -> bool:
        """Whether the next message may start now, in the term with this token."""
        permit = self.permit(queue, token)
        return permit is not None and permit.is_firm

    def permit(self, queue: str, token: int) -> Term | None:
        """Return the term with this token, to be checked before each message; None if it is over."""
        term = self._term(queue)
        return term if term is not None and term.token == token else None

    def report_fenced(self, queue: str, token: int) -> None:
        """End a term at once, because the broker has refused its token."""
        term = self._term(queue)
        if term is not None and term.token == token:
            term.fall("the broker does not know this term")
            self.changed()

    def report_doubt(self, queue: str, token: int) -> None:
        """End a term with a hand-over, because a claim got no answer."""
        term = self._term(queue)
        if term is not None and term.token == token:
            term.end("a claim got no answer from the broker")

    def attach_consumer(self, queue: str, consumption: SingletonConsumer) -> None:
        """Set the consumer of the queue."""
        self._consumers[queue] = consumption

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of a term."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Do not call `listener` any more."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    # -- called by the work of a term

    def changed(self) -> None:
        """Call all listeners."""
        for listener in tuple(self._listeners):
            listener()

    def is_busy(self, queue: str, token: int) -> bool:
        """Whether this process has messages of that term in flight."""
        consumption = self._consumers.get(queue)
        return consumption is not None and consumption.is_busy(queue, token)

    def should_yield(self, queue: str) -> bool:
        """Whether another worker should lead this queue, for balance."""
        return self._balancer.should_yield(queue)

    def is_cut_off(self, queue: str, token: int) -> bool:
        """Whether this worker cannot reach the broker, while another one may."""
        consumption = self._consumers.get(queue)
        return consumption is not None and consumption.is_cut_off(queue, token)

    def _term(self, queue: str) -> Term | None:
        elector = self._electors.get(queue)
        return None if elector is None else elector.term


class QueueDuties:
    """The work of the leader of a singleton queue; see ``LeaderCallbacks``."""

    def __init__(
        self,
        leaderships: WorkerLeaderships,
        options: SingletonOptions,
        fence: Fence | None,
        guard: Guard,
        kills: bool,
    ) -> None:
        self._leaderships = leaderships
        self._options = options
        self._fence = fence
        self._guard = guard
        self._kills = kills

    def floor(self) -> int:
        """Return the highest token that the broker knows.

        A server that has lost its data must not give out a token of an earlier term again: the guard would
        kill the process that runs a message with such a token.
        """
        return 0 if self._fence is None else self._fence.epoch(self._options.name)

    def trust(self, term: Term, until: float) -> None:
        """Set the end of trust in the guard."""
        self._guard.trust(term.name, term.token, until)

    def abort(self, term: Term) -> None:
        """Kill the process that runs a message, without waiting for its alarm."""
        self._guard.revoke(term.name, term.token)
        self._leaderships.changed()

    def serve(self, term: Term) -> None:
        """Do the work of one term, from the fence to the hand-over."""
        career = self._leaderships.career(term.name)
        if self._fence is not None and not self._raise_fence(self._fence, term):
            return
        if career is not None:
            career.term = term
            career.inaugurate(term.token)
        try:
            if term.inaugurated():
                logger.info(
                    "This worker leads queue %r, token %d.",
                    term.name,
                    term.token,
                    extra={"event": "singleton_queue_led"},
                )
                self._leaderships.changed()
                while not term.wait(LOOK_OUT_S):
                    if self._leaderships.should_yield(term.name):
                        term.end("another worker leads fewer queues")
                    if self._leaderships.is_cut_off(term.name, term.token):
                        term.end("the broker does not answer this worker")
        finally:
            self._guard.announce_end(term.name, term.token)
            self._leaderships.changed()
            self._wait_for_running(term)
            if career is not None:
                career.hand_over()

    def _raise_fence(self, fence: Fence, term: Term) -> bool:
        outage = Outage(logger, "fence_outage")
        while not term.ended:
            try:
                epoch = fence.raise_to(term.name, term.token)
            except OSError as error:
                outage.began(
                    "The fence of queue %r cannot be raised (%s); the term does not start until the broker "
                    "answers.",
                    term.name,
                    error,
                )
                term.wait(PAUSE_S)
                continue
            if epoch > term.token:
                raise Fenced(
                    f"queue {term.name!r} is fenced with token {epoch}, above this worker's {term.token}"
                )
            outage.over("The broker has raised the fence of queue %r.", term.name)
            return True
        return False

    def _wait_for_running(self, term: Term) -> None:
        """Wait until no work of the term runs; kill it first if the queue's hand-over is ``abort``."""
        if self._options.hand_over == "abort" and self._kills:
            self._guard.revoke(term.name, term.token)
        while self._leaderships.is_busy(term.name, term.token):
            if not self._guard.runs(term.name) and (
                term.phase is Phase.FALLEN or self._leaderships.is_cut_off(term.name, term.token)
            ):
                # Only acknowledgements are left, and the broker refuses them or cannot be reached.
                return
            time.sleep(LOOK_S)
