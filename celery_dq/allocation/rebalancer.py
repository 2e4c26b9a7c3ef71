"""The elected allocator: computes the assignment of partitions to workers, and publishes it.

A partition without a worker is assigned at once. A better balance, after a worker has joined, waits for
``join_delay_s``, so that workers that start together cause one change.

After an outage that was longer than the session, all workers register again, one after the other, and serve
what they served before. A new allocator that sees this waits for the rest of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

from celery_dq.allocation.assignment import Assignment, RunningWorker, compute
from celery_dq.allocation.nodes import Members, PublishedAssignment
from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import MessageTooLarge
from celery_dq.leadership.career import Career
from celery_dq.leadership.runner import Runner
from celery_dq.leadership.zookeeper_election import ZooKeeperElection
from celery_dq.shown import shown_logger
from celery_dq.znodes import AllocationNodes, AllocatorNodes
from celery_dq.zookeeper.session import Session

__all__ = ["Rebalancer", "allocator"]

logger = shown_logger(__name__)

#: Seconds after which the members are read again although no watch has fired.
LONGEST_WAIT_S = 30.0


class Rebalancer(Career[bool]):
    """The career of the allocator.

    Args:
        session: The session.
        nodes: The nodes of the allocation.
        join_delay_s: Seconds for which a better balance waits for more workers to join.
        clock: Wall and monotonic time.
    """

    def __init__(
        self, session: Session, nodes: AllocationNodes, join_delay_s: float, clock: Clock | None = None
    ) -> None:
        self._session = session
        self._published = PublishedAssignment(session, nodes)
        self._join_delay_s = join_delay_s
        self._clock: Clock = clock or SystemClock()
        self._changed = threading.Event()
        self._members = Members(session, nodes, self._changed.set)
        self._token = 0
        self._current = Assignment()
        #: Monotonic time at which the members are read again, and since which a better balance is known.
        self._look_at = -math.inf
        self._unbalanced_since: float | None = None
        #: Until when this allocator waits for workers that were there before it (monotonic).
        self._returned_at = -math.inf

    def floor(self) -> int:
        """Return the token of the assignment in force, which refuses lower ones."""
        generation = self._published.generation()
        return 0 if generation is None else generation.token

    def inaugurate(self, token: int) -> None:
        """Read the assignment in force."""
        wait_s = max(self._session.timeout_s, self._join_delay_s)
        self._returned_at = self._clock.monotonic() + wait_s
        self._token, self._look_at, self._unbalanced_since = token, -math.inf, None
        generation = self._published.generation()
        self._current = Assignment() if generation is None else self._published.read(generation.number)

    def wait(self, timeout_s: float) -> bool | None:
        """Wait for a change of the members, at most `timeout_s` seconds; return True if one may be there."""
        wait_s = min(max(self._look_at - self._clock.monotonic(), 0.0), timeout_s)
        if self._changed.wait(wait_s) or self._look_at <= self._clock.monotonic():
            self._changed.clear()
            return True
        return None

    def execute(self, message: bool) -> bool:
        """Publish another assignment if the members have changed."""
        now = self._clock.monotonic()
        self._look_at = now + LONGEST_WAIT_S
        members = self._members.read()
        wanted = compute(members)
        # Without a member, or with members that consume nothing yet, the last assignment stays.
        if not wanted.servers or wanted == self._current:
            self._unbalanced_since = None
            return True
        if self._current.is_served(members):
            if self._unbalanced_since is None:
                self._unbalanced_since = now
            balance_at = self._unbalanced_since + self._join_delay_s
            if now < balance_at:
                self._look_at = balance_at
                return True
        elif now < self._returned_at and self._all_register_again(members):
            self._look_at = min(self._look_at, self._returned_at)
            return True
        self._unbalanced_since = None
        self._publish(wanted)
        return True

    def _all_register_again(self, members: Iterable[RunningWorker]) -> bool:
        """Whether each running worker of the last assignment is newer, so that others may follow."""
        former = {member.name for member in members} & set(self._current.servers.values())
        created = self._members.created
        return bool(former) and all(created[name] > self._published.flipped_in for name in former)

    def _publish(self, wanted: Assignment) -> None:
        try:
            generation = self._published.publish(wanted, self._current, self._token, self._clock.wall())
        except MessageTooLarge as error:
            logger.error(
                "The assignment of %d partitions was not published (%s). The last one stays in force: start "
                "more workers, or give the queues fewer partitions.",
                len(wanted.servers),
                error,
                extra={"event": "allocation_not_published"},
            )
            return
        self._current, self._returned_at = wanted, -math.inf
        logger.info(
            "Generation %d of the allocation is in force: %d partitions on %d workers, of which %d moved.",
            generation.number,
            generation.partitions,
            generation.workers,
            generation.moved,
            extra={"event": "allocation_published", "generation": generation.number},
        )


def allocator(session: Session, environment: str, worker: str, join_delay_s: float) -> Runner[bool]:
    """Return a candidate for the election of the allocator, with its career.

    Args:
        session: The session of the worker.
        environment: ``online`` or ``sandbox``.
        worker: Name of the worker.
        join_delay_s: See :class:`Rebalancer`.
    """
    career = Rebalancer(session, AllocationNodes(environment), join_delay_s)
    election = ZooKeeperElection(session, AllocatorNodes(environment), worker)
    return Runner(career, election, source=career.wait, requeue=lambda _: None, floor=career.floor)
