"""Balances leaderships over workers: two candidates for the same queues never differ by more than one.

Each worker decides for itself from the lines of candidates. It compares itself with one other candidate at a
time, and counts only the queues for which both are candidates. A worker that leads two queues more than
another one resigns from one queue at a time. A worker that is first in line and leads more queues than
another candidate lets the other one lead. If the candidates cannot be read, no worker yields.

While nothing changes, a worker reads the lines less and less often.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Collection, Mapping
from typing import Protocol

from celery_dq.clock import Clock
from celery_dq.shown import shown_logger

__all__ = ["Candidacy", "CandidateLines", "Balancer"]

logger = shown_logger(__name__)

#: Minimum seconds between two checks of the balance by a worker; up to the same time is added at random.
LOOK_S = 2.0
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
        self._look_at = clock.monotonic() + LOOK_S
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
        if own_queues and now - self._declined_at.pop(queue, float("-inf")) > LOOK_S:
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
                self._look_at = now + LOOK_S * (1 + random.random())
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
            self._pause_s = min(max(2 * self._pause_s, LOOK_S), LONGEST_PAUSE_S)
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
