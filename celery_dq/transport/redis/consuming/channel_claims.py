"""The claims of one channel: which of its queues are due, how much it asks for, and what came of it.

The states of a consumed queue::

    idle ──wake-up, next look, new consumer──▶ may have work ──claim──▶ may have work, or idle

A queue *may have work* when a message of it may be eligible. Each trip claims from such queues in turn while
the channel has free capacity, which several claims may share. A queue keeps the state as long as its claims
come back full or report more messages. An *idle* queue waits for its wake-up.

The *next look* is the time at which the next delayed or throttled message is due. The claim script assigns it
to one consumer at a time. All other consumers rely on the consumer that took the wake-up or has the next
look. If that consumer has no free slot when the look is due, or stops, it hands the wake-up over to another
one.

How much a claim asks for follows from the free slots and from what may be claimed ahead. In a worker, a
window limits the messages ahead (:class:`ClaimWindow`). Where callbacks run in the delivering thread, their
pace does (:class:`CallbackPace`). Several claims share what fits (:class:`ClaimsUnderWay`).

The consumer thread calls all methods of :class:`ChannelClaims`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

import redis

from celery_dq.clock import Clock
from celery_dq.protocols import WorkerCapacity
from celery_dq.transport.in_flight import Acks, InFlightMessage, PendingAcks
from celery_dq.transport.partition_replies import ClaimedEntry, ClaimReply
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming.consumer_thread import RETRY_AFTER_REFUSAL_S, ConsumerThread, Trip
from celery_dq.transport.redis.consuming.subscriptions import (
    ReadyQueues,
    Subscription,
    WakeupGroups,
    WakeupListener,
)
from celery_dq.transport.redis.store.partition import Queue
from celery_dq.transport.redis.store.script_calls import is_lost
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS
from celery_dq.transport.redis.store.transient import TransientListener

_T = TypeVar("_T")

#: Seconds after which a claim without an answer uses up no capacity of other masters.
OVERDUE_CLAIM_S = 0.5
#: Wake-ups that one trip hands over. After a connect, other consumers may rely on this one for each queue.
MAX_HANDOVERS = 100
#: Maximum number of messages per claim, so that a script stays short.
MAX_CLAIM = 200
#: Number of messages by which one late message shrinks the window. Most messages are then in time.
LATE_WEIGHT = 4
#: Maximum number of claims under way.
MAX_CLAIMS = 16
#: Messages that the claims under way bring together, by the mean of the last ones. More claims would spread
#: the acks over more queues, and each call carries those of one queue.
BATCH = 16
#: Messages that each of several claims asks for, at least, so that it pays for itself.
MIN_SHARE = 8
#: Seconds that the discards of one claim may take: a new message waits for that long.
SLICE_S = 0.001
#: Discards of one claim before one was measured, and the most for any claim: receiving one takes time, too.
FIRST_DISCARDS, MOST_DISCARDS = 4, 8
#: Seconds from one claim of discards to the next by the same consumer, at least and at most.
MIN_REST_S, MAX_REST_S = 0.002, 1.0
#: Length of a rest, in times of the seconds that the discards of the claim take.
REST_SHARE = 2
#: Maximum number of messages that a consumer without a prefetch count receives ahead.
MAX_AHEAD = 64
#: Share of the mean service time that the last callback makes up.
LAST_SHARE = 0.3
#: Longest brief callback, in times of the claim-ahead time: messages may wait for that long in any case.
BRIEF_AHEADS = 2


class Inboxes(Protocol):
    """The delivering side of a channel. Several consumer threads of a cluster may share it.

    Attributes:
        lock: Held from the question for the capacity to the claims that use it.
        discard_pace: Decides how many discards a claim takes besides its messages.
        suspect: Delivery tag of a *suspect*: a message that was in flight when a worker died. Until it is
            over, no second suspect is claimed, so that a poison message kills its neighbours at most once.
        awaits_ends: Whether a message may be delivered when another one ends.
    """

    lock: Any
    discard_pace: DiscardPace
    suspect: str | None
    awaits_ends: bool

    def capacity(self, claims: ChannelClaims) -> tuple[int, int]:
        """Return how many messages these claims may bring, and how many of them fit free pool slots."""

    def has_room(self, claims: ChannelClaims) -> None:
        """Let other claims use the capacity that these have not used."""

    def place(self, claims: ChannelClaims, subscription: Subscription) -> None:
        """Hand a subscription over to the thread that is to have its queue."""

    def check_consumption(self, claims: ChannelClaims, now: float) -> None:
        """Check, after a round of renewals, whether the channel still consumes."""

    def hands_over_at(self) -> float:
        """Return the monotonic time from which wake-ups without a free slot are handed over."""

    def receive(self, subscription: Subscription, entry: ClaimedEntry, held: InFlightMessage) -> None:
        """Take a claimed message."""

    def before_trip(self, claims: ChannelClaims, now: float) -> float:
        """Release what waits too long, follow the leaderships; return when to do so again."""

    def after_trip(self, claims: ChannelClaims) -> None:
        """Wake the delivery if a message may be delivered."""

    def fail(self, error: Exception) -> None:
        """Let the delivery raise an error."""


class ChannelClaims:
    """The claims of one channel by one consumer thread.

    Args:
        identity: Consumer identity of the process.
        thread: The consumer thread.
        inboxes: Has the capacity, and receives the claimed messages.
        wakeups: Class of the wait for wake-ups.
    """

    def __init__(
        self,
        identity: ConsumerIdentity,
        thread: ConsumerThread,
        inboxes: Inboxes,
        wakeups: type[WakeupGroups] = WakeupGroups,
    ) -> None:
        self._identity = identity
        self._thread = thread
        self._inboxes = inboxes
        self._wakeups_class = wakeups
        self._wakeups: WakeupGroups | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self.ready = ReadyQueues()
        self._shares = ClaimsUnderWay()
        #: Queues whose wake-up must be handed over, with the number of handovers.
        self._handovers: list[tuple[Queue, int]] = []
        #: See :class:`ServedChannel`.
        self.has_queues = False
        self.awaits_room = False
        #: Transient queues, by the keys of their lists.
        self._listeners: dict[str, TransientListener] = {}
        #: Subscribes to broadcasts; None without any.
        self.broadcasts: Any = None
        #: Monotonic time at which the last claims were sent.
        self.asked_at = -math.inf
        #: Monotonic time of the last answered claim, for the watchdog.
        self.claimed_at = identity.clock.monotonic()
        self._look_at = math.inf

    # -- subscriptions ---------------------------------------------------------

    @property
    def wakeups(self) -> WakeupGroups:
        """The waits for wake-ups."""
        if self._wakeups is None:
            self._wakeups = self._wakeups_class(self._thread.pool)
        return self._wakeups

    def subscribe(
        self,
        queue: Queue,
        limit: Callable[[], int] | None = None,
        is_empty: bool = False,
    ) -> Subscription:
        """Start claiming from *queue*.

        Args:
            queue: The queue.
            limit: Returns the maximum number of messages to claim; see :class:`Subscription`.
            is_empty: Whether the queue stored no message a moment ago, so that its next message comes with a
                wake-up. A claim from each of thousands of empty queues would delay those of the others.

        Returns:
            The subscription, which exists already for a queue that is claimed from.
        """
        subscription = self._subscriptions.get(queue.prefix)
        if subscription is None:
            self._subscriptions[queue.prefix] = subscription = Subscription(queue, limit)
            self.has_queues = True
            self._restart_wait(self.wakeups.join(subscription))
            if is_empty:
                self._thread.leases.renew_soon([queue])
                return subscription
            self.ready.wake(subscription)
            if self._identity.may_have_claimed(queue):
                # An earlier connection may have taken a wake-up, or have been assigned the next look.
                self.ready.rely_on(subscription)
        return subscription

    def unsubscribe(self, prefix: str) -> Subscription | None:
        """Stop claiming from a partition; return the subscription that ended, None without one."""
        subscription = self._subscriptions.pop(prefix, None)
        if subscription is not None:
            waited = self._leave_wakeups(subscription)
            if waited or self.ready.is_awaited(subscription):
                self._hand_over_later(subscription.queue, 2 if waited else 1)
            self.ready.remove(subscription)
        return subscription

    def _leave_wakeups(self, subscription: Subscription) -> bool:
        """Stop waiting for the wake-ups of a queue, and return whether a wait was under way."""
        if subscription.waits is None:
            return False
        waited = self._restart_wait(self.wakeups.group_of(subscription))
        self.wakeups.leave(subscription)
        self._thread.sockets_changed = True
        return waited

    def _restart_wait(self, group: WakeupListener) -> bool:
        """Cancel the wait of a group, because its queues have changed; return whether it waited."""
        if waited := group.cancel_wait():
            self._thread.sockets_changed = True
            # A wake-up may have been lost with the connection.
            for subscription in group.members.values():
                self.ready.rely_on(subscription)
        return waited

    def listen(self, key: str, deliver: Callable[[bytes], None]) -> None:
        """Start popping the plain list of a transient queue, unless the channel pops it already.

        Args:
            key: Key of the list.
            deliver: Gets each message. It is the same function for each consumer of the queue.
        """
        if key not in self._listeners:
            self._listeners[key] = TransientListener(key, deliver, self._thread.pool)

    def unlisten(self, key: str) -> None:
        """Stop popping a plain list."""
        listener = self._listeners.pop(key, None)
        if listener is not None:
            listener.close()
            self._thread.sockets_changed = True

    @property
    def thread(self) -> ConsumerThread:
        """The thread of these claims."""
        return self._thread

    @property
    def subscriptions(self) -> list[Subscription]:
        """The queues that are claimed from now."""
        return list(self._subscriptions.values())

    def __contains__(self, prefix: str) -> bool:
        return prefix in self._subscriptions

    def may_bring(self, now: float) -> int:
        """Return how many messages the claims under way may bring. A master that hangs counts no longer."""
        return self._shares.may_bring if now - self.asked_at < OVERDUE_CLAIM_S else 0

    @property
    def _runs_suspect(self) -> bool:
        return self._inboxes.suspect is not None and self._inboxes.suspect in self._identity.in_flight

    def look_again(self, prefix: str | None = None) -> None:
        """Look again at the partition with this prefix, or at all, although no wake-up came."""
        for name in tuple(self._subscriptions) if prefix is None else (prefix,):
            if name in self._subscriptions:
                self.ready.wake(self._subscriptions[name])

    def turn_at(self, subscription: Subscription, at: float) -> None:
        """Let the thread turn at a monotonic time for this queue."""
        subscription.wake_at = at
        self.ready.plan(subscription)

    # -- the masters of a cluster --------------------------------------------------

    def follow_slots(self) -> None:
        """See :class:`ServedChannel`."""
        for subscription in self.subscriptions:
            self._inboxes.place(self, subscription)

    def give_up(self, subscription: Subscription) -> None:
        """Stop claiming from a queue that another thread of this process is to have."""
        del self._subscriptions[subscription.queue.prefix]
        self._leave_wakeups(subscription)
        self.ready.remove(subscription)

    def begin_again(self) -> None:
        """See :class:`ServedChannel`."""
        if self._wakeups is not None:
            self._wakeups.close()
            self._wakeups = None
        for subscription in self._subscriptions.values():
            subscription.waits = None
            # A wake-up may have been lost, and Redis may have assigned the next look.
            self.ready.rely_on(subscription)
        self._thread.sockets_changed = True

    def after_round(self, now: float) -> None:
        """See :class:`ServedChannel`."""
        if self._subscriptions:
            self._inboxes.check_consumption(self, now)

    # -- the turn of the thread --------------------------------------------------

    def plan(self, trip: Trip) -> None:
        """Add the due claims and hand-overs to a trip."""
        self._look_at = self._inboxes.before_trip(self, trip.now)
        if not self._subscriptions and not self._handovers:
            return
        self.ready.take_due(trip.now, self._inboxes.suspect is not None and self._runs_suspect)
        # Most turns are for other things, such as an ack, and change nothing here.
        if self.ready.relied_on or self.ready.backing_off or self.ready.has_claimable:
            with self._inboxes.lock:
                want, free = self._capacity()
                if want > 0:
                    self._add_claims(trip, want, free)
            if want <= 0 and self.ready.relied_on and self._inboxes.hands_over_at() <= trip.now:
                for subscription in tuple(islice(self.ready.to_hand_over(), MAX_HANDOVERS)):
                    self._hand_over(subscription)
        while self._handovers and trip.room > 0:
            queue, times = self._handovers.pop()
            call = queue.partition.hand_over_wakeup(queue.consumer(self._identity.consumer))
            failed = partial(self._not_handed_over, queue)
            trip.add(call, queue, partial(self._handed_over, queue, times), failed)

    def wait(self, now: float) -> float:
        """Begin the waits for wake-ups, transient messages and broadcasts; see :class:`ServedChannel`."""
        next_at = self._wait_for_wakeups(now) if self.has_queues else math.inf
        for listener in self._listeners.values():
            before = listener.connection.connection
            listener.tick(now)
            if listener.connection.connection is not before:
                self._thread.sockets_changed = True
            if listener.waits_after_refusal:
                next_at = min(next_at, listener.resumes_at)
        if self.broadcasts is not None and self.broadcasts.turn_at <= now and self.broadcasts.turn(now):
            self._thread.sockets_changed = True
        return next_at

    def _wait_for_wakeups(self, now: float) -> float:
        """Begin the waits for wake-ups; return the monotonic time from which a trip is due."""
        self._inboxes.after_trip(self)
        ready, wakeups, next_at, want = self.ready, self._wakeups, self._look_at, 0
        is_claimable, relied_on = ready.has_claimable, ready.relied_on
        may_wait = wakeups is not None and wakeups.needs_capacity
        if may_wait or is_claimable or relied_on:
            want, _ = self._capacity()
        if wakeups is not None:
            if wakeups.wait(now, may_wait=may_wait and want > 0):
                self._thread.sockets_changed = True
            next_at = min(next_at, wakeups.asks_at)
        self.awaits_room = (
            is_claimable
            or bool(relied_on or ready.backing_off)
            or (may_wait and want <= 0)
            or self._inboxes.awaits_ends
        )
        if self._handovers or (is_claimable and want > 0):
            return 0.0
        if relied_on and want <= 0:
            next_at = min(next_at, self._inboxes.hands_over_at())
        return min(next_at, ready.next_time())

    def sockets(self) -> Iterator[tuple[Any, Callable[[], object]]]:
        """Yield the connections on which something may come, each with the function that reads it."""
        for group in self._wakeups or ():
            if group.connection.connection is not None:
                yield group.connection.connection, partial(self._read_wakeups, group)
        for listener in self._listeners.values():
            if listener.connection.connection is not None:
                yield listener.connection.watched, partial(self._read_messages, listener)
        if self.broadcasts is not None and self.broadcasts.connection is not None:
            yield self.broadcasts.connection, self.broadcasts.read

    def _capacity(self) -> tuple[int, int]:
        """Return how many messages to claim, and how many of them fit free slots."""
        want, free = self._inboxes.capacity(self)
        # Messages claimed ahead would take the slots for which a tenant waits.
        return (free if self.ready.needing_slots else want), free

    def may_wait_for_claim(self, queue: Queue, box: PendingAcks) -> bool:
        """Return whether the pending finishes of *queue* may wait for its next claim."""
        subscription = self._subscriptions.get(queue.prefix)
        return subscription is not None and (
            subscription.may_have_work or not subscription.is_end_awaited(box.finishes)
        )

    def _read_wakeups(self, group: WakeupListener) -> None:
        for subscription in self._read("wait for wake-ups", group, group.read_wakeups) or ():
            self.ready.rely_on(subscription)
        if group.connection.connection is None:  # it was idle for longer than the setting `timeout` of Redis
            self._thread.sockets_changed = True

    def _read_messages(self, listener: TransientListener) -> None:
        message = self._read("wait for replies", listener, listener.read)
        if message is not None:
            listener.deliver(message)

    def _read(
        self, command: str, waiter: WakeupListener | TransientListener, read: Callable[[], _T]
    ) -> _T | None:
        """Return what a wait has brought. A wait that Redis refuses begins again later."""
        refusals = self._identity.refusals
        # Not by `watch`: it would cost five calls for each message.
        try:
            answer = read()
        except PASSING_ERRORS:
            raise
        except redis.ResponseError as exc:
            refusals.refused(command, exc)
            waiter.resumes_at = self._identity.clock.monotonic() + RETRY_AFTER_REFUSAL_S
            return None
        if refusals.reasons:
            refusals.accepted(command)
        return answer

    # -- handing over ------------------------------------------------------------

    def _hand_over(self, subscription: Subscription) -> None:
        """Hand the wake-up and the next look over to another consumer, for lack of a free slot."""
        self.ready.handed_over(subscription)
        self._hand_over_later(subscription.queue)

    def _hand_over_later(self, queue: Queue, times: int = 1) -> None:
        if not queue.token:  # a singleton queue has no other consumer
            self._handovers.append((queue, times))

    def _handed_over(self, queue: Queue, times: int, _is_woken: bool) -> None:
        # The broker may send a wake-up to a connection that was closed; with the first answer it has noticed.
        if times > 1:
            self._handovers.append((queue, times - 1))

    def _not_handed_over(self, queue: Queue, exc: Exception) -> None:
        if not is_lost(exc):
            self._thread.refused("hand_over_wakeup", queue, exc)

    # -- claims ----------------------------------------------------------------

    def _add_claims(self, trip: Trip, want: int, free: int) -> None:
        """Add claims that together bring at most *want* messages.

        One of them *leads*: only this one may bring a suspect and discards. So two claims never bring two
        suspects, and several claims bring no more discards than one.
        """
        shares, all_free, room = self._shares, free, trip.room
        self.ready.end_backoffs(free)
        chosen: list[tuple[Subscription, int, int]] = []
        leader: Subscription | None = None
        while len(chosen) < room and (share := shares.share(want, len(self.ready))) > 0:
            subscription = self.ready.next_claimable(leader is None or not leader.needs_lead)
            if subscription is None:
                break
            queue = subscription.queue
            # Another channel claims from it, or the next trip is to bring what this one releases: within one,
            # the claim would be first where the server lacks the script of the release.
            if queue.key in trip.claims or self._thread.will_release(queue, trip):
                self.ready.wake(subscription)
                break
            if subscription.claim_limit is not None:
                share = min(share, subscription.claim_limit())
            subscription.free_at_last_claim = all_free if free else 0
            shares.add(queue.key, share)
            trip.claims.add(queue.key)
            chosen.append((subscription, share, min(free, share)))
            want, free = want - share, max(free - share, 0)
            if leader is None or subscription.needs_lead or subscription.led_at < leader.led_at:
                leader = subscription
        for subscription, share, fitting in chosen:
            self._add_claim(trip, subscription, share, fitting, subscription is leader)

    def _add_claim(self, trip: Trip, subscription: Subscription, want: int, free: int, leads: bool) -> None:
        identity, queue = self._identity, subscription.queue
        trip.acked.add(queue.key)
        acks = identity.in_flight.pending_acks(queue.key).take()
        if not acks:
            trip.acked.discard(queue.key)
        subscription.is_claiming, subscription.is_woken, subscription.needs_lead = True, False, False
        if leads:
            subscription.led_at = trip.now
        call = queue.partition.claim(
            queue.consumer(identity.consumer),
            lease_ms=identity.lease_ms,
            want=want,
            free=free,
            hold=True,
            max_deliveries=queue.max_deliveries,
            suspects=leads and not self._runs_suspect,
            discards=self._inboxes.discard_pace.room() if leads else 0,
            discard_rest_s=self._inboxes.discard_pace.rest_s(),
            **acks.tags(),
        )
        identity.in_doubt.claim_sent(queue.key)
        self.asked_at = trip.now
        answered = partial(self._claimed, subscription, acks, want, leads, trip.now)
        trip.add(call, queue, answered, partial(self._not_claimed, subscription, acks))

    def _not_claimed(self, subscription: Subscription, acks: Acks, exc: Exception) -> None:
        identity, queue = self._identity, subscription.queue
        subscription.is_claiming = False
        self._shares.answered(queue.key, None)
        self._inboxes.has_room(self)
        identity.in_flight.restore_acks(queue.key, acks)
        # The claim may have taken messages, also where Redis has ended its script.
        identity.in_doubt.claim_unanswered(queue.key)
        if self._subscriptions.get(queue.prefix) is not subscription:
            self._hand_over_later(queue)
            return
        # Redis may have assigned the next look with the failed claim.
        self.ready.rely_on(subscription)
        if not is_lost(exc):
            pause_s = self._thread.refused("claim", queue, exc)
            self.ready.pause(subscription, identity.clock.monotonic() + pause_s)

    def _claimed(
        self,
        subscription: Subscription,
        acks: Acks,
        want: int,
        leads: bool,
        sent_at: float,
        claimed: ClaimReply,
    ) -> None:
        identity, ready, queue = self._identity, self.ready, subscription.queue
        acks.confirm()
        identity.claim_times[queue.name].add(identity.clock.monotonic() - sent_at)
        subscription.is_claiming = False
        message_count = len([entry for entry in claimed.entries if not entry.reason])
        try:
            self._take(subscription, want, leads, sent_at, message_count, claimed)
        except BaseException:
            # The messages that were not recorded as in flight are released after a comparison.
            identity.in_doubt.claim_unanswered(queue.key)
            ready.pause(subscription, identity.clock.monotonic() + 1.0)
            raise
        finally:
            # The inbox already has them, so that no other thread counts them too little.
            self._shares.answered(queue.key, message_count)
            if message_count < want:
                self._inboxes.has_room(self)
        identity.in_doubt.claim_answered(queue.key, {entry.claim for entry in claimed.entries})

    def _take(
        self,
        subscription: Subscription,
        want: int,
        leads: bool,
        sent_at: float,
        message_count: int,
        claimed: ClaimReply,
    ) -> None:
        identity, ready, queue = self._identity, self.ready, subscription.queue
        is_gone = self._subscriptions.get(queue.prefix) is not subscription
        if claimed.fenced:
            self._fenced(subscription, claimed.lost_up_to or 0)
            return
        if subscription.waits is None and not is_gone:
            self._restart_wait(self.wakeups.join(subscription))
        self.claimed_at = now = identity.clock.monotonic()
        identity.watchdog_strikes, subscription.has_limits = 0, claimed.has_limits
        (ready.needing_slots.discard if is_gone or not claimed.needs_slot else ready.needing_slots.add)(
            subscription
        )
        next_look_at = None if claimed.next_look_s is None else now + claimed.next_look_s
        if not is_gone:
            ready.looked(subscription, next_look_at)
            if claimed.more and not claimed.entries:
                # A claim that does not lead may have passed over suspects only because another one leads.
                ready.found_none(subscription, now, self._runs_suspect, needs_lead=not leads)
            else:
                subscription.reset_backoff()
                has_more = claimed.more or subscription.is_woken or message_count >= want
                (ready.wake if has_more else ready.rest)(subscription)
        elif next_look_at is not None:
            self._hand_over_later(queue)
        for entry, held in identity.claimed(queue, claimed, sent_at):
            if held is None:
                # The entry is void. Another claim may find messages, and the next look may be lost.
                if not is_gone:
                    ready.rely_on(subscription)
                continue
            if is_gone:
                identity.in_flight.release(held.tag, "unstarted")
                continue
            if claimed.suspect:
                self._inboxes.suspect = held.tag
            self._inboxes.receive(subscription, entry, held)

    def _fenced(self, subscription: Subscription, last_claim: int) -> None:
        """Handle a fenced claim: the queue has a later leader, or one that this process does not know."""
        self.ready.rest(subscription)
        if not subscription.queue.token:
            # Another BLPOP on this queue would take wake-ups away from the leader. The queue may become an
            # ordinary one.
            self._leave_wakeups(subscription)
            self.ready.pause(subscription, self._identity.clock.monotonic() + self._identity.lease_s)
        self._identity.record_fenced(subscription.queue, last_claim)

    # -- closing ---------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End the claims with an error, which the delivery raises."""
        self.close()
        self._inboxes.fail(error)

    def close(self) -> None:
        """Close all connections."""
        for key in tuple(self._listeners):
            self.unlisten(key)
        self._handovers.clear()
        if self.broadcasts is not None:
            self.broadcasts.close()
        if self._wakeups is not None:
            self._wakeups.close()
        self._thread.sockets_changed = True


class ClaimWindow:
    """Limits the messages claimed ahead by the time that they wait.

    The service time of tasks leaves out the work of Celery between them. So a *window* limits the messages,
    too. It grows with each message that was delivered within the claim-ahead time, and shrinks with each one
    that waited longer.

    Args:
        claim_ahead_s: Service time that may be claimed ahead, in seconds.
    """

    def __init__(self, claim_ahead_s: float) -> None:
        self._claim_ahead_s = claim_ahead_s
        self._size = 1
        self._is_full = False

    def delivered(self, waited_s: float) -> None:
        """Adapt the window to a message that was delivered this many seconds after its claim."""
        change = 1 if waited_s <= self._claim_ahead_s else -LATE_WEIGHT
        self._size = min(max(self._size + change, 0), 2 * MAX_CLAIM)

    def close(self) -> None:
        """Claim nothing ahead before the next delivery."""
        self._size = 0

    def room(self, capacity: WorkerCapacity, qos: Any, undelivered: int) -> tuple[int, int]:
        """Return how many messages to claim, and how many of them fit free pool slots.

        Args:
            capacity: Capacity of the worker.
            qos: Prefetch count of the channel.
            undelivered: Number of messages that are claimed and not delivered.
        """
        # worker_disable_prefetch replaces the method on the instance. Then only free slots are filled.
        is_gated = "can_consume" in vars(qos)
        if is_gated and not qos.can_consume():
            return 0, 0
        slots, allowed = capacity.free_slots(), qos.can_consume_max_estimate()
        room = MAX_CLAIM if slots is None else slots
        free = max((room if allowed is None else min(room, allowed)) - undelivered, 0)
        limit = 0 if is_gated else min(capacity.claim_ahead(), self._size)
        # Celery holds the reserved messages beyond its slots: then the number of free slots is negative.
        ahead = limit - max(undelivered - (slots or 0), 0)
        # Half the limit at a time, unless a slot is free: the broker prepares one half while the worker runs
        # the other, and each call brings enough messages to pay for itself.
        half = (limit + 1) // 2
        if free <= 0 and ahead < max(half, 1):
            return 0, 0
        want = min(free + max(ahead, 0), max(half, free), MAX_CLAIM)
        return want, min(free, want)

    def may_deliver(self, capacity: WorkerCapacity | None, qos: Any) -> bool:
        """Return whether the prefetch count allows a delivery.

        A full worker gets its next messages when half of the count or a slot is free. One at a time, each
        would cost a turn of the event loop and a script call.

        Args:
            capacity: Capacity of the worker; None in plain kombu.
            qos: Prefetch count of the channel.
        """
        if not qos.can_consume():
            self._is_full = True
        elif self._is_full:
            allowed, half = qos.can_consume_max_estimate(), (qos.prefetch_count + 1) // 2
            has_half = capacity is None or allowed is None or allowed >= half
            self._is_full = not (has_half or (capacity is not None and (capacity.free_slots() or 0) > 0))
        return not self._is_full


class ClaimsUnderWay:
    """The claims of one channel without an answer, at most one for each queue."""

    def __init__(self) -> None:
        #: The most messages that each claim may bring, by :attr:`Queue.key`.
        self._wanted: dict[str, int] = {}
        self._mean_brought: float = BATCH

    @property
    def may_bring(self) -> int:
        """The most messages that all claims may bring."""
        return sum(self._wanted.values())

    def share(self, want: int, ready: int) -> int:
        """Return how many messages the next claim asks for; 0 for no claim.

        Args:
            want: Number of messages that fit the capacity, beside those that the claims under way may bring.
            ready: Number of queues from which a claim may be sent.
        """
        most = min(math.ceil(BATCH / max(self._mean_brought, 1.0)), MAX_CLAIMS)
        claims = min(most - len(self._wanted), ready)
        return 0 if claims <= 0 else max(min(want, max(-(-want // claims), MIN_SHARE)), 0)

    def add(self, key: str, want: int) -> None:
        """Add a claim from the queue with this key for *want* messages."""
        self._wanted[key] = want

    def answered(self, key: str, message_count: int | None) -> None:
        """Remove a claim that brought *message_count* messages; None if it failed."""
        del self._wanted[key]
        if message_count is not None:
            self._mean_brought = 0.8 * self._mean_brought + 0.2 * message_count


class DiscardPace:
    """Decides how many discards one claim takes, and how long none follows, so that they delay no message.

    A discard needs no pool slot, but the fetching thread records it, and delivers no message for that time.
    The claim script applies the rest to the whole queue, whose consumers share it. So neither Redis nor a
    worker is busy with discards all the time.

    Args:
        clock: measures by its monotonic time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: float | None = None

    def room(self) -> int:
        """Return how many discards the next claim may take."""
        if self._seconds is None:
            return FIRST_DISCARDS
        return max(1, min(int(SLICE_S / max(self._seconds, 1e-6)), MOST_DISCARDS))

    def rest_s(self) -> float:
        """Return how long this process takes no other discards after a claim that brought some."""
        took = 0.0 if self._seconds is None else self.room() * self._seconds
        return min(max(REST_SHARE * took, MIN_REST_S), MAX_REST_S)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record one discard inside the ``with``."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            seen = self._clock.monotonic() - began
            self._seconds = seen if self._seconds is None else 0.8 * self._seconds + 0.2 * seen


class CallbackPace:
    """The time that a consumer takes for one message, where callbacks run in the delivering thread.

    Args:
        clock: measures by its monotonic time.
        claim_ahead_s: Service time that may be claimed ahead, in seconds.
    """

    def __init__(self, clock: Clock, claim_ahead_s: float) -> None:
        self._clock = clock
        self._claim_ahead_s = claim_ahead_s
        #: Monotonic time of the last delivery.
        self.delivered_at = clock.monotonic()
        self._is_timing = False
        #: Mean service time in seconds; None before the first callback has ended.
        self.mean_s: float | None = None

    def begin(self, is_timed: bool) -> None:
        """Note a delivery.

        Args:
            is_timed: Whether the callback runs in the delivering thread, so that its time is measured.
        """
        self.delivered_at = self._clock.monotonic()
        self._is_timing = is_timed

    def end(self) -> None:
        """Take the time since the last delivery for the service time of its message, once."""
        if not self._is_timing:
            return
        self._is_timing = False
        seen_s = self._clock.monotonic() - self.delivered_at
        if self.mean_s is None:
            self.mean_s = seen_s
        else:
            self.mean_s += LAST_SHARE * (seen_s - self.mean_s)

    def messages_ahead(self) -> int:
        """Return how many messages fit the claim-ahead time, for a consumer without a prefetch count."""
        ahead = 1 if self.mean_s is None else int(self._claim_ahead_s / max(self.mean_s, 1e-6))
        return min(max(ahead, 1), MAX_AHEAD)
