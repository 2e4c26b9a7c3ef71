"""The queues that a channel consumes: the state of each, their turn, and their wake-ups.

A turn of the consumer thread costs what is ready in :class:`ReadyQueues`, however many queues there are.

One ``BLPOP`` names the wake-up lists of a group of queues, on a connection of its own. So a *wake-up* costs
the next wait of one group, however many queues the channel consumes. Up to :data:`GROUP_SIZE` queues are one
group.

A group waits while no queue of it may have work. While some may, the group *asks* for wake-ups of its other
queues now and then, by a script that does not wait: a backlog in one queue must not hide the messages of
another. For the same reason, the queue that was served is the last one in the next ``BLPOP``.

When Redis refuses a wait or a question, e.g. because it cannot save, the group tries again a second later.

Other consumers rely on the consumer that took the wake-up of a queue, or keeps its next look. Without a free
slot, and when it stops to consume, it hands them over by a script.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import redis

from celery_dq.transport.in_flight import InFlightMessage
from celery_dq.transport.redis.store.full_server import POP_FIRST
from celery_dq.transport.redis.store.partition import Queue
from celery_dq.transport.redis.store.script_calls import (
    BLPOP_TIMEOUT_S,
    OVERDUE_S,
    PipelinedConnection,
)

#: Shortest back-off, in seconds, after a claim found eligible messages but none for this channel.
MIN_BACKOFF_S = 0.02
#: Longest back-off, in seconds. It is reached only while the channel runs a suspect and finds only suspects.
MAX_BACKOFF_S = 1.0
#: Stale entries of the heap of times, beside one for each entry in use, before all are removed.
MAX_STALE = 64
#: More pool slots than any worker has.
UNLIMITED = 1 << 30
#: Queues of a group. More make each wait longer to send, and fewer make more connections.
GROUP_SIZE = 100
#: Maximum number of groups. With more queues, the groups are larger.
MAX_GROUPS = 30
#: Seconds from one question of a group to its next, and to the next question of any group.
ASK_EVERY_S, ASK_SPACING_S = 0.1, 0.03


class WaitGroup:
    """Queues that share one wait for wake-ups."""

    #: Number of queues that may have work.
    busy = 0


@dataclass(eq=False, slots=True)
class Subscription:
    """A queue that the channel consumes.

    Attributes:
        queue: The queue.
        may_have_work: Whether a message of the queue may be eligible. Set by
            :class:`ReadyQueues`.
        is_claiming: Whether a claim is under way.
        is_woken: Whether a wake-up has come during the claim, which may have run before.
        next_look_at: Monotonic time of the next look that the claim script assigned to this process; None
            without one.
        backoff_s: Length of the next back-off, in seconds.
        backoff_until: Monotonic end of the back-off; 0.0 without one.
        free_at_last_claim: Free pool slots at the last claim; 0 if it could use none of them. The back-off
            ends early when more slots are free.
        wake_at: Monotonic time at which the tick must run in any case; None without one.
        claim_limit: Returns the maximum number of messages to claim; None without a limit of its own.
        needs_lead: Whether the next claim must be one that may bring a suspect, because the last one has
            passed over all eligible messages.
        led_at: Monotonic time of the last claim that could bring a suspect.
        waits: The group of queues that share one wait for wake-ups.
        timer_at: Time for which the queue is planned; infinity without one.
        has_limits: Whether a tenant may have a limit, as of the last claim.
    """

    queue: Queue
    claim_limit: Callable[[], int] | None = None
    may_have_work: bool = False
    is_claiming: bool = False
    is_woken: bool = False
    next_look_at: float | None = None
    backoff_s: float = MIN_BACKOFF_S
    backoff_until: float = 0.0
    free_at_last_claim: int = 0
    wake_at: float | None = None
    needs_lead: bool = False
    led_at: float = -math.inf
    waits: WaitGroup | None = None
    timer_at: float = math.inf
    has_limits: bool = True

    def may_claim(self) -> bool:
        """Return whether the queue has no limit of its own, or has not reached it."""
        return self.claim_limit is None or self.claim_limit() > 0

    def is_end_awaited(self, finishes: Iterable[InFlightMessage]) -> bool:
        """Return whether the end of one of these messages may let another one start."""
        if self.has_limits or self.queue.token:
            return True
        for held in tuple(finishes):  # noqa: SIM110 - a generator costs a call for each
            if held.has_lock:
                return True
        return False

    def next_time(self) -> float:
        """Return the earliest monotonic time at which the queue needs a tick; infinity without one."""
        times = (self.next_look_at, self.backoff_until or None, self.wake_at)
        return min((at for at in times if at is not None), default=math.inf)

    def back_off(self, now: float, suspect_runs: bool) -> None:
        """Back off: the eligible messages are suspects, or their tenants are at their concurrency.

        Args:
            now: Monotonic time.
            suspect_runs: Whether the channel runs a suspect. The next back-off is then twice as long.
        """
        self.backoff_until = now + self.backoff_s
        if suspect_runs:
            # Each claim inspects all other suspects, and the running one may take hours.
            self.backoff_s = min(2 * self.backoff_s, MAX_BACKOFF_S)

    def reset_backoff(self) -> None:
        """Reset the back-off: a message for this channel may be eligible."""
        self.backoff_s, self.backoff_until = MIN_BACKOFF_S, 0.0


class ReadyQueues:
    """The order in which a channel claims from its queues. Each queue has one claim per round."""

    def __init__(self) -> None:
        #: Queues that may have work, except those that back off or have a claim under way.
        self._ready: OrderedDict[Subscription, None] = OrderedDict()
        #: Queues from which nothing is claimed for a moment, or before more slots are free.
        self.backing_off: dict[Subscription, None] = {}
        #: Queues whose back-off is longer because the channel runs a suspect.
        self._slowed: dict[Subscription, None] = {}
        #: Queues at which the other consumers wait for this process to look: after it took a wake-up, when
        #: its next look is due, or while the result of an earlier claim is unknown.
        self.relied_on: dict[Subscription, None] = {}
        #: Queues whose next look this process keeps.
        self._looks: dict[Subscription, None] = {}
        #: Queues in which a tenant with a concurrency limit has its turn and needs a free slot.
        self.needing_slots: set[Subscription] = set()
        #: The fewest free slots at the last claims of the queues that back off, or fewer.
        self._free = 0
        #: (time, number, queue). An entry counts only with the `timer_at` of its queue.
        self._times: list[tuple[float, int, Subscription]] = []
        self._numbers = itertools.count()
        #: Entries in use when stale ones were last removed.
        self._used = 0

    def __len__(self) -> int:
        """Return the number of queues from which a claim may be sent now."""
        return len(self._ready)

    @property
    def has_claimable(self) -> bool:
        """Whether there is a queue from which a claim may be sent now."""
        for subscription in self._ready:
            if subscription.claim_limit is None or subscription.claim_limit() > 0:
                return True
        return False

    # -- states ------------------------------------------------------------------

    def wake(self, subscription: Subscription) -> None:
        """Note that a message of this queue may be eligible."""
        if not subscription.may_have_work:
            subscription.may_have_work = True
            if subscription.waits is not None:
                subscription.waits.busy += 1
        if not subscription.is_claiming and subscription not in self.backing_off:
            self._ready.setdefault(subscription)

    def rely_on(self, subscription: Subscription) -> None:
        """Note that a message may be eligible, and that the other consumers rely on this process."""
        self.wake(subscription)
        self.relied_on[subscription] = None
        subscription.is_woken = subscription.is_claiming

    def rest(self, subscription: Subscription) -> None:
        """Note that no message of this queue is eligible before its next wake-up."""
        self._ready.pop(subscription, None)
        self.backing_off.pop(subscription, None)
        # Another consumer may serve the tenant, and this one may not claim from the queue for long.
        self.needing_slots.discard(subscription)
        if subscription.may_have_work:
            subscription.may_have_work = False
            if subscription.waits is not None:
                subscription.waits.busy -= 1

    def remove(self, subscription: Subscription) -> None:
        """Forget this queue."""
        self.rest(subscription)
        self.handed_over(subscription)
        self._slowed.pop(subscription, None)
        subscription.timer_at = math.inf

    def found_none(
        self, subscription: Subscription, now: float, runs_suspect: bool, needs_lead: bool
    ) -> None:
        """Claim from this queue after a moment: no eligible message was one for this channel.

        Args:
            subscription: The queue.
            now: Monotonic time.
            runs_suspect: Whether the channel runs a suspect.
            needs_lead: Whether the claim could bring no suspect. If none runs, the next one may bring it.
        """
        # Without a free slot, the claim has rather passed over tenants with a concurrency limit.
        subscription.needs_lead = needs_lead and subscription.free_at_last_claim > 0
        if subscription.needs_lead and not runs_suspect:
            self.wake(subscription)
            return
        subscription.back_off(now, runs_suspect)
        if runs_suspect:
            self._slowed[subscription] = None
        self._back_off(subscription)

    def pause(self, subscription: Subscription, until: float) -> None:
        """Claim from this queue at a monotonic time, and not earlier."""
        subscription.backoff_until, subscription.free_at_last_claim = until, UNLIMITED
        self._back_off(subscription)

    def _back_off(self, subscription: Subscription) -> None:
        """Claim from this queue after its ``backoff_until``, or when more slots are free than at its last."""
        self._ready.pop(subscription, None)
        self.backing_off[subscription] = None
        self._free = min(self._free, subscription.free_at_last_claim)
        self.plan(subscription)

    def resume(self, subscription: Subscription) -> None:
        """End the back-off of this queue, if it backs off."""
        subscription.backoff_until = 0.0
        if subscription in self.backing_off:
            del self.backing_off[subscription]
            self._ready.setdefault(subscription)

    def _end_slow_backoffs(self) -> None:
        """End the back-offs that a suspect has made longer, because it is over."""
        for subscription in self._slowed:
            subscription.reset_backoff()
            self.resume(subscription)
        self._slowed.clear()

    # -- turns -------------------------------------------------------------------

    def end_backoffs(self, free: int) -> None:
        """End the back-offs of the queues at whose last claim fewer slots were free.

        Args:
            free: Free pool slots now, besides those for the claims under way.
        """
        if free <= self._free:
            return
        for subscription in tuple(self.backing_off):
            if free > subscription.free_at_last_claim:
                self.resume(subscription)
                # Its last claim may have had no slot because those of other queues took all.
                self._ready.move_to_end(subscription, last=False)
        self._free = free

    def next_claimable(self, may_lead: bool) -> Subscription | None:
        """Return the queue whose turn it is, which must have an answer or return by :meth:`wake`.

        Args:
            may_lead: Whether the claim may bring a suspect; else queues that wait for such a claim are passed
                over.
        """
        for _ in range(len(self._ready)):
            subscription, _nothing = self._ready.popitem(last=False)
            if subscription.may_claim() and (may_lead or not subscription.needs_lead):
                return subscription
            self._ready[subscription] = None
        return None

    # -- times -------------------------------------------------------------------

    def plan(self, subscription: Subscription) -> None:
        """Note that a time of this queue has changed."""
        at = subscription.next_time()
        if at < subscription.timer_at:
            subscription.timer_at = at
            heapq.heappush(self._times, (at, next(self._numbers), subscription))
            if len(self._times) > 2 * self._used + MAX_STALE:
                used = {entry[2]: entry for entry in self._times if entry[0] == entry[2].timer_at}
                self._times = sorted(used.values())
                self._used = len(self._times)

    def looked(self, subscription: Subscription, next_look_at: float | None) -> None:
        """Note that a claim was answered, which planned the next look or none."""
        self.handed_over(subscription)
        if subscription.is_woken:
            self.relied_on[subscription] = None
        if next_look_at is not None:
            subscription.next_look_at = next_look_at
            self._looks[subscription] = None
            self.plan(subscription)

    def handed_over(self, subscription: Subscription) -> None:
        """Note that no other consumer waits for this process to look at this queue."""
        subscription.next_look_at = None
        self.relied_on.pop(subscription, None)
        self._looks.pop(subscription, None)

    def is_awaited(self, subscription: Subscription) -> bool:
        """Return whether another consumer waits for this process to look at this queue, now or later."""
        return subscription in self.relied_on or subscription in self._looks

    def to_hand_over(self) -> Iterator[Subscription]:
        """Yield the queues whose wake-ups another consumer could take; a singleton queue has no other one."""
        return (subscription for subscription in self.relied_on if not subscription.queue.token)

    def take_due(self, now: float, runs_suspect: bool) -> None:
        """Wake the queues whose next look or back-off is due.

        Args:
            now: Monotonic time.
            runs_suspect: Whether the channel runs a suspect, for which some back-offs are longer.
        """
        while self._times and self._times[0][0] <= now:
            at, _, subscription = heapq.heappop(self._times)
            if at != subscription.timer_at:
                continue
            subscription.timer_at = math.inf
            if subscription.next_look_at is not None and subscription.next_look_at <= now:
                self.handed_over(subscription)
                self.rely_on(subscription)
            if subscription.backoff_until and subscription.backoff_until <= now:
                self.resume(subscription)
            if subscription.wake_at is not None and subscription.wake_at <= now:
                subscription.wake_at = None
            self.plan(subscription)
        if self._slowed and not runs_suspect:
            self._end_slow_backoffs()

    def next_time(self) -> float:
        """Return the earliest time of all queues; infinity without one."""
        while self._times and self._times[0][0] != self._times[0][2].timer_at:
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else math.inf


class WakeupListener(WaitGroup):
    """A group of queues whose wake-ups one connection receives.

    Args:
        pool: Pool that the connection is taken from.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self.connection = PipelinedConnection(pool)
        #: Monotonic start of the current wait or question; None without one.
        self.waiting_since: float | None = None
        #: Whether it is a question, which is answered at once.
        self.is_asking = False
        #: The queues, by the keys of their wake-up lists.
        self.members: dict[bytes, Subscription] = {}
        self._asked_at = -math.inf
        #: Monotonic time until which no wait begins, after a refusal.
        self.resumes_at = -math.inf

    @property
    def is_waiting(self) -> bool:
        """Whether a wait or a question is under way, so that this channel may receive a wake-up."""
        return self.waiting_since is not None

    def start_wait(self, now: float) -> None:
        """Start to wait for a wake-up of any member.

        Args:
            now: Monotonic time.

        Raises:
            redis.RedisError: The connection broke.
        """
        self.connection.open()
        self.connection.send(("BLPOP", *self.members, BLPOP_TIMEOUT_S))
        self.is_asking, self.waiting_since = False, now

    def ask(self, now: float) -> None:
        """Ask for a wake-up of any member that has no work.

        Args:
            now: Monotonic time.

        Raises:
            redis.RedisError: The connection broke.
        """
        self.connection.open()
        # An idle Redis ends a short BLPOP up to 0.1 s late, and a full one refuses it in a transaction, in
        # which it would not wait.
        keys = [key for key, each in self.members.items() if not each.may_have_work]
        self.connection.send(("EVAL", POP_FIRST, len(keys), *keys))
        self.is_asking, self.waiting_since, self._asked_at = True, now, now

    @property
    def asks_at(self) -> float:
        """Monotonic time from which the group asks again; infinity if each member has work."""
        return self._asked_at + ASK_EVERY_S if self.busy < len(self.members) else math.inf

    def check_alive(self, now: float) -> None:
        """Check that Redis answers the wait in time.

        Args:
            now: Monotonic time.

        Raises:
            redis.ConnectionError: The answer is overdue.
        """
        silent_s = 0.0 if self.waiting_since is None else now - self.waiting_since
        # An unread answer means that this process was busy, not that the connection is dead.
        if silent_s > BLPOP_TIMEOUT_S + OVERDUE_S and not self.connection.has_unread_input():
            raise redis.ConnectionError(
                f"Redis has not answered a BLPOP for {silent_s:.0f} s: the connection is dead"
            )

    def read_wakeups(self) -> list[Subscription]:
        """Read the answer of the wait.

        Returns:
            The queue whose wake-up has come; none after a wait without a wake-up.

        Raises:
            redis.RedisError: The connection broke in a wait, or the answer is an error.
        """
        try:
            answer = self.connection.read()
        except redis.ConnectionError:
            if self.is_waiting:
                raise
            self.connection.close()  # it was idle for longer than the setting `timeout` of Redis
            return []
        except redis.ResponseError:
            self.waiting_since = None
            raise
        self.waiting_since = None
        if answer is None:
            return []
        key = answer[0].encode() if isinstance(answer[0], str) else bytes(answer[0])
        subscription = self.members.pop(key, None)
        if subscription is not None:
            self.members[key] = subscription
        return [] if subscription is None else [subscription]

    def cancel_wait(self) -> bool:
        """Cancel the wait. A wake-up that Redis has already sent is lost then.

        Returns:
            Whether a wait was under way.
        """
        waited = self.is_waiting
        if waited:
            self.close()
        return waited

    def close(self) -> None:
        """Close the connection."""
        self.waiting_since = None
        self.connection.close()


class WakeupGroups:
    """All waits of one channel.

    Args:
        pool: Pool that the connections are taken from.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self.groups: list[WakeupListener] = []
        #: Monotonic time of the next question; infinity without one.
        self.asks_at = math.inf
        self._asked_at = -math.inf

    def __iter__(self) -> Iterator[WakeupListener]:
        return iter(self.groups)

    @property
    def is_waiting(self) -> bool:
        """Whether each group waits."""
        return bool(self.groups) and all(each.is_waiting and not each.is_asking for each in self.groups)

    @property
    def needs_capacity(self) -> bool:
        """Whether the free capacity decides on something: a wait or a question may begin."""
        for each in self.groups:
            if each.is_asking or (each.waiting_since is None and each.busy < len(each.members)):
                return True
        return False

    def join(self, subscription: Subscription) -> WakeupListener:
        """Add a queue to a group."""
        group = self._group_to_join(subscription)
        group.members[subscription.queue.partition.keys.wake.encode()] = subscription
        group.busy += subscription.may_have_work
        subscription.waits = group
        return group

    def _group_to_join(self, subscription: Subscription) -> WakeupListener:
        """Return the smallest group, or a new one."""
        # The pool has other connections, too, and its user may have limited them.
        most = max(min(MAX_GROUPS, getattr(self._pool, "max_connections", MAX_GROUPS) // 2), 1)
        group = min(self.groups, key=lambda each: len(each.members), default=None)
        if group is None or (len(group.members) >= GROUP_SIZE and len(self.groups) < most):
            group = WakeupListener(self._pool)
            self.groups.append(group)
        return group

    def group_of(self, subscription: Subscription) -> WakeupListener:
        """Return the group of a queue that has joined one."""
        return next(group for group in self.groups if group is subscription.waits)

    def leave(self, subscription: Subscription) -> None:
        """Remove a queue from its group."""
        group, subscription.waits = self.group_of(subscription), None
        del group.members[subscription.queue.partition.keys.wake.encode()]
        if subscription.may_have_work:
            group.busy -= 1
        if not group.members:
            self.groups.remove(group)
            group.close()

    def wait(self, now: float, *, may_wait: bool) -> bool:
        """Start the waits of the groups without work, and the questions of the others.

        Args:
            now: Monotonic time.
            may_wait: Whether the channel could take a message now.

        Returns:
            Whether there may be another connection.

        Raises:
            redis.RedisError: A connection broke, or an answer is overdue.
        """
        self.asks_at = resumes_at = math.inf
        is_changed = False
        for group in self.groups:
            if group.waiting_since is not None:
                group.check_alive(now)
            elif not may_wait:
                continue
            elif now < group.resumes_at:
                resumes_at = min(resumes_at, group.resumes_at)
            elif not group.busy:
                before = group.connection.connection
                group.start_wait(now)
                is_changed = is_changed or group.connection.connection is not before
            else:
                self.asks_at = min(self.asks_at, group.asks_at)
        if self.asks_at != math.inf:
            is_changed = self._ask(now) or is_changed
        self.asks_at = min(self.asks_at, resumes_at)
        return is_changed

    def _ask(self, now: float) -> bool:
        """Let the group ask that has not asked for the longest time, if that is due; see :meth:`wait`."""
        is_changed = False
        if max(self.asks_at, self._asked_at + ASK_SPACING_S) <= now:
            waiting = (each for each in self.groups if not (each.is_waiting or now < each.resumes_at))
            group = min(waiting, key=lambda each: each.asks_at)
            before = group.connection.connection
            group.ask(now)
            is_changed, self._asked_at = group.connection.connection is not before, now
        self.asks_at = max(self.asks_at, self._asked_at + ASK_SPACING_S)
        return is_changed

    def close(self) -> None:
        """Close all connections."""
        self.asks_at = math.inf
        for group in self.groups:
            group.close()
