"""Spreads leadership over the workers: nobody leads two queues more than somebody who would lead one of them.

Each worker decides for itself, by who stands for what. One that leads too many resigns from a queue at a
time; one that is first in line and leads more than another candidate lets that one go first. Balance is a
convenience: where the candidates cannot be asked, nobody yields.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Mapping

from celery_dq.clock import Clock
from celery_dq.leadership.office import Office

__all__ = ["Spread"]

logger = logging.getLogger(__name__)

#: Seconds between two looks of a worker at who leads what; up to as much is added, at random.
LOOK_S = 2.0


class Spread:
    """Who should lead what.

    :param offices: of this worker, by queue; may grow.
    """

    def __init__(self, offices: Mapping[str, Office], clock: Clock) -> None:
        self._offices = offices
        self._clock = clock
        self._look_at = clock.monotonic() + LOOK_S
        self._lock = threading.Lock()

    def may_take(self, queue: str) -> bool:
        """Whether no other candidate for `queue` leads fewer queues than this worker."""
        led = [name for name, office in list(self._offices.items()) if office.term is not None]
        if not led:
            return True
        others = self._loads_of_others(queue)
        return not others or min(others.values()) >= len(led)

    def should_yield(self, queue: str) -> bool:
        """Whether this worker leads two queues more than a candidate for `queue`; at most one at a time."""
        with self._lock:
            now = self._clock.monotonic()
            led = sorted(name for name, office in list(self._offices.items()) if office.term is not None)
            if now < self._look_at or len(led) < 2:
                return False
            others = self._loads_of_others(queue)
            if not others or min(others.values()) > len(led) - 2:
                return False
            self._look_at = now + LOOK_S * (1 + random.random())
            return True

    def _loads_of_others(self, queue: str) -> Counter[str]:
        """How many queues each other candidate for `queue` leads, of those that this worker knows."""
        offices = dict(self._offices)
        try:
            lines = {name: office.election.standing() for name, office in offices.items()}
        except OSError as error:
            logger.debug("Who leads what is not known: %s", error)
            return Counter()
        me = worker_of(offices[queue].election.who)
        loads: Counter[str] = Counter()
        for name in lines[queue]:
            if worker_of(name) != me:
                loads[worker_of(name)] = 0
        for line in lines.values():
            if line and worker_of(line[0]) in loads:
                loads[worker_of(line[0])] += 1
        return loads


def worker_of(who: str) -> str:
    """The worker that a candidate belongs to: its name without the unique part."""
    return who.rpartition(":")[0]
