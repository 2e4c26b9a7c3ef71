"""The queues of a channel that may have work, in their turn, and the times at which others are due.

A turn of the event loop costs what is ready here, however many queues the channel consumes. No I/O.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict

from celery_dq.transport.redis.consuming.subscription import Subscription

#: Stale entries of the heap of times, beside one for each entry in use, before all are removed.
MAX_STALE = 64


class ReadyQueues:
    """The order in which a channel claims from its queues. Each queue has one claim per round."""

    def __init__(self) -> None:
        #: Queues that may have work, except those that back off or have a claim under way.
        self._ready: OrderedDict[Subscription, None] = OrderedDict()
        self._backing_off: dict[Subscription, None] = {}
        #: Queues whose back-off is longer because the channel runs a suspect.
        self._slowed: dict[Subscription, None] = {}
        #: Free slots when the back-offs were last compared with them.
        self._free = 0
        #: (time, number, queue). An entry counts only with the `timer_at` of its queue.
        self._times: list[tuple[float, int, Subscription]] = []
        self._numbers = itertools.count()
        #: Entries in use when stale ones were last removed.
        self._used = 0

    def __len__(self) -> int:
        """Return the number of queues from which a claim may be sent now."""
        return len(self._ready)

    # -- states ------------------------------------------------------------------

    def wake(self, source: Subscription) -> None:
        """Note that a message of this queue may be eligible."""
        if not source.may_have_work:
            source.may_have_work = True
            if source.waits is not None:
                source.waits.busy += 1
        if not source.is_claiming and source not in self._backing_off:
            self._ready.setdefault(source)

    def rest(self, source: Subscription) -> None:
        """Note that no message of this queue is eligible before its next wake-up."""
        self._ready.pop(source, None)
        self._backing_off.pop(source, None)
        if source.may_have_work:
            source.may_have_work = False
            if source.waits is not None:
                source.waits.busy -= 1

    def remove(self, source: Subscription) -> None:
        """Forget this queue."""
        self.rest(source)
        self._slowed.pop(source, None)
        source.timer_at = math.inf

    def back_off(self, source: Subscription, now: float, suspect_runs: bool) -> None:
        """Claim from this queue after a moment: no eligible message is one for this channel."""
        source.back_off(now, suspect_runs)
        if suspect_runs:
            self._slowed[source] = None
        self.pause(source)

    def pause(self, source: Subscription) -> None:
        """Claim from this queue after its ``backoff_until``, or when more slots are free than at its last claim."""
        self._ready.pop(source, None)
        self._backing_off[source] = None
        self._free = min(self._free, source.free_at_last_claim)
        self.plan(source)

    def resume(self, source: Subscription) -> None:
        """End the back-off of this queue, if it backs off."""
        source.backoff_until = 0.0
        if source in self._backing_off:
            del self._backing_off[source]
            self._ready.setdefault(source)

    def end_slow_backoffs(self) -> None:
        """End the back-offs that a suspect has made longer, because it is over."""
        for source in self._slowed:
            source.reset_backoff()
            self.resume(source)
        self._slowed.clear()

    # -- turns -------------------------------------------------------------------

    def next_claimable(self, free: int, may_lead: bool) -> Subscription | None:
        """Return the queue whose turn it is, which must have an answer or return by :meth:`wake`.

        Args:
            free: Free pool slots now.
            may_lead: Whether the claim may bring a suspect; else queues that wait for such a claim are passed
                over.
        """
        if free > self._free:
            for source in tuple(self._backing_off):
                if free > source.free_at_last_claim:
                    self.resume(source)
        self._free = free
        for _ in range(len(self._ready)):
            source, _nothing = self._ready.popitem(last=False)
            is_limited = source.claim_limit is not None and source.claim_limit() <= 0
            if not is_limited and (may_lead or not source.needs_lead):
                return source
            self._ready[source] = None
        return None

    # -- times -------------------------------------------------------------------

    def plan(self, source: Subscription) -> None:
        """Note that a time of this queue has changed."""
        at = source.next_time()
        if at < source.timer_at:
            source.timer_at = at
            heapq.heappush(self._times, (at, next(self._numbers), source))
            if len(self._times) > 2 * self._used + MAX_STALE:
                used = {entry[2]: entry for entry in self._times if entry[0] == entry[2].timer_at}
                self._times = sorted(used.values())
                self._used = len(self._times)

    def take_due(self, now: float) -> list[Subscription]:
        """Return the queues with a time that may be over; each is planned again by :meth:`plan`."""
        due = []
        while self._times and self._times[0][0] <= now:
            at, _, source = heapq.heappop(self._times)
            if at == source.timer_at:
                source.timer_at = math.inf
                due.append(source)
        return due

    def next_time(self) -> float:
        """Return the earliest time of all queues; infinity without one."""
        while self._times and self._times[0][0] != self._times[0][2].timer_at:
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else math.inf
