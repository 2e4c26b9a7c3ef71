"""Spreads leadership over the workers: nobody leads two queues more than somebody who would lead one of them.

Each worker decides for itself, by who stands for what. It compares itself with one other candidate at a time,
over the queues for which both of them stand: what one of the two cannot lead says nothing about balance. One
that leads too many resigns from a queue at a time; one that is first in line and leads more than another
candidate lets that one go first. Balance is a convenience: where the candidates cannot be asked, nobody
yields.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Mapping
from typing import Protocol

from celery_dq.clock import Clock

__all__ = ["Candidacy", "Line", "Spread"]

logger = logging.getLogger(__name__)

#: Seconds between two looks of a worker at who leads what; up to as much is added, at random.
LOOK_S = 2.0


class Line(Protocol):
    """Who stands for one queue."""

    who: str

    def standing(self) -> list[str]:
        """All living candidates, the leader first."""


class Candidacy(Protocol):
    """A worker and one queue: what is asked here of :class:`~celery_dq.leadership.office.Office`."""

    @property
    def term(self) -> object | None:
        """The present term; None while somebody else leads."""

    @property
    def election(self) -> Line:
        """Where it stands."""


class Spread:
    """Who should lead what.

    :param offices: of this worker, by queue; may grow.
    """

    def __init__(self, offices: Mapping[str, Candidacy], clock: Clock) -> None:
        self._offices = offices
        self._clock = clock
        self._look_at = clock.monotonic() + LOOK_S
        self._lock = threading.Lock()
        #: The queue that the last look has found to be one too many, until its term hears of it.
        self._surplus = ""
        #: By queue, when this worker last let others go first (monotonic).
        self._declined_at: dict[str, float] = {}

    def may_take(self, queue: str) -> bool:
        """Whether no other candidate for `queue` leads fewer queues than this worker.

        Who has let the others go first, and is first again, takes it: nobody did, and each of them may have
        somebody else in mind.
        """
        led = self._led()
        now = self._clock.monotonic()
        if led and now - self._declined_at.pop(queue, float("-inf")) > LOOK_S:
            lines = self._lines()
            if any(self._lead_over(other, lines, led) > 0 for other in self._others(queue, lines)):
                self._declined_at[queue] = now
                return False
        return True

    def should_yield(self, queue: str) -> bool:
        """Whether this worker leads two queues more than a candidate for `queue`; at most one at a time."""
        # While another term looks, this one has its own end to watch.
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

    def _led(self) -> set[str]:
        return {name for name, office in list(self._offices.items()) if office.term is not None}

    def _find_surplus(self) -> str:
        """One of our queues that a candidate who leads two fewer could lead; "" if there is none."""
        led = self._led()
        if len(led) < 2:
            return ""
        lines = self._lines()
        found = [
            queue
            for queue in led
            if any(self._lead_over(other, lines, led) > 1 for other in self._others(queue, lines))
        ]
        # At random: always the same one could go round in a circle, from one worker to the next.
        return random.choice(found) if found else ""

    def _lines(self) -> dict[str, list[str]]:
        """The workers in line for each queue that this one stands for, the leader first; {} if unknown."""
        try:
            return {
                name: [worker_of(who) for who in office.election.standing()]
                for name, office in list(self._offices.items())
            }
        # Whatever the server or another candidate has said: no term ends for that.
        except Exception as error:
            logger.debug("Who leads what is not known: %r", error)
            return {}

    def _others(self, queue: str, lines: Mapping[str, list[str]]) -> set[str]:
        return set(lines.get(queue, ())) - {worker_of(self._offices[queue].election.who)}

    def _lead_over(self, other: str, lines: Mapping[str, list[str]], led: set[str]) -> int:
        """How many queues more than `other` this worker leads, of those for which both stand."""
        shared = [name for name, line in lines.items() if other in line]
        theirs = sum(lines[name][0] == other for name in shared)
        return sum(name in led for name in shared) - theirs


def worker_of(who: str) -> str:
    """The worker that a candidate belongs to: its name without the unique part."""
    return who.rpartition(":")[0]
