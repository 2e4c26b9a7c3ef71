"""Brings messages from Redis to one channel, without polling and without blocking.

Each channel has a connection that carries the scripts, and one for each group of queues, on which a
``BLPOP`` waits for a *wake-up* of any partition of the group. The states of a consumed queue::

    idle ──wake-up, next look, new consumer──▶ may have work ──claim──▶ may have work, or idle

A queue *may have work* when a message of it may be eligible. The fetcher claims from such queues in turn
while the channel has free capacity, which claims from several queues may share. A queue keeps the state as
long as its claims come back full or report more messages. An *idle* queue waits for its wake-up.

The *next look* is the time at which the next delayed or throttled message is due. The claim script assigns it
to one consumer at a time. All other consumers rely on the consumer that took the wake-up or has the next
look. If that consumer has no free slot when the look is due, or stops, it hands the wake-up over to another
one.

Pending acks travel with the next claim of their partition, or alone when no claim is due.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Protocol

import redis

from celery_dq.transport.in_flight.in_flight_messages import RIDE_ALONG_S
from celery_dq.transport.in_flight.pending_acks import Acks, PendingAcks, tags
from celery_dq.transport.partition_replies import ClaimedEntry, ClaimReply
from celery_dq.transport.redis.consuming.claim_limits import ClaimsUnderWay, DiscardPace
from celery_dq.transport.redis.consuming.consuming_channel import WatchedSocket
from celery_dq.transport.redis.consuming.subscriptions import ReadyQueues, Subscription
from celery_dq.transport.redis.consuming.wakeups import Handovers, WakeupGroups, WakeupListener
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.in_flight.script_pipeline import (
    RETRY_AFTER_REFUSAL_S,
    ClaimFailure,
    InFlightCall,
    ScriptPipeline,
)
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.transient import TransientListener

#: Wake-ups that one turn of the loop hands over. After a connect, it may rely on this process for each queue.
MAX_HANDOVERS = 100


class ClaimingConsumer(Protocol):
    """The consumer for which a fetcher claims."""

    def capacity(self) -> tuple[int, int]:
        """Return how many messages to claim, and how many of them fit free pool slots."""

    def can_keep_next_look(self) -> bool | None:
        """Return whether the process can keep a next look while it works.

        None means that it is about to block, so that it may not even wait for a wake-up.
        """

    @property
    def acks_may_wait(self) -> bool:
        """Whether the loop turns in time for acks that wait for a claim."""

    def receive(self, source: Subscription, entry: ClaimedEntry, tag: str) -> None:
        """Take a claimed message, which has this delivery tag."""


class RedisFetcher:
    """The consuming side of one channel.

    Args:
        process: Consumer identity of the process, with its in-flight messages.
        pool: Pool of the connections that the event loop watches.
        consumer: Has the capacity, and receives the claimed messages.
        pipelines: Class of the script pipeline.
        wakeups: Class of the wait for wake-ups.
    """

    def __init__(
        self,
        process: ConsumerIdentity,
        pool: redis.ConnectionPool,
        consumer: ClaimingConsumer,
        pipelines: type[ScriptPipeline] = ScriptPipeline,
        wakeups: type[WakeupGroups] = WakeupGroups,
    ) -> None:
        self._process = process
        self._consumer = consumer
        self.pipeline = pipelines(process, pool, self._may_wait_for_claim)
        self.wakeups = wakeups(pool)
        self._pool = pool
        self._subscriptions: dict[str, Subscription] = {}
        self._ready = ReadyQueues()
        self._claims = ClaimsUnderWay()
        #: Decides how many discards a claim takes besides its messages.
        self.discard_pace = DiscardPace(process.clock)
        #: Takes wake-ups, and hands them over to other consumers.
        self.handovers = Handovers(process, self._ready, self.pipeline, self.wakeups)
        #: Transient queues, by the keys of their lists.
        self._listeners: dict[str, TransientListener] = {}
        #: Delivery tag of a *suspect*: a message that was in flight when a worker died. Until it is over, no
        #: second suspect is claimed, so that a poison message kills its neighbours at most once.
        self._suspect: str | None = None
        #: Monotonic time of the last answered claim, for the watchdog.
        self.claimed_at = process.clock.monotonic()

    # -- subscriptions ---------------------------------------------------------

    def subscribe(
        self,
        queue: Queue,
        limit: Callable[[], int] | None = None,
        claimed: Callable[[], None] | None = None,
        is_empty: bool = False,
    ) -> Subscription:
        """Start fetching from *queue*.

        Args:
            queue: The queue.
            limit: Returns the maximum number of messages to claim; see :class:`Subscription`.
            claimed: Called after each claim; see :class:`Subscription`.
            is_empty: Whether the queue stored no message a moment ago, so that its next message comes with a
                wake-up. A claim from each of thousands of empty queues would delay those of the others.

        Returns:
            The subscription, which exists already for a queue that is fetched from.
        """
        source = self._subscriptions.get(queue.prefix)
        if source is None:
            self._subscriptions[queue.prefix] = source = Subscription(queue, limit, claimed)
            self.handovers.restart_wait(self.wakeups.join(source))
            if is_empty:
                return source
            self._ready.wake(source)
            if self._process.may_have_claimed(queue):
                # An earlier connection may have taken a wake-up, or have been assigned the next look.
                self._ready.rely_on(source)
        return source

    def unsubscribe(self, prefix: str) -> Subscription | None:
        """Stop fetching from a partition; the messages of a claim under way are released when answered.

        Returns:
            The subscription that ended; None without one.
        """
        source = self._subscriptions.pop(prefix, None)
        if source is not None:
            waited = self._leave_wakeups(source)
            if waited or self._ready.is_awaited(source):
                self.handovers.add(source, 2 if waited else 1)
            self._ready.remove(source)
        return source

    def _leave_wakeups(self, source: Subscription) -> bool:
        """Stop waiting for the wake-ups of a queue, and return whether a wait was under way."""
        if source.waits is None:
            return False
        waited = self.handovers.restart_wait(self.wakeups.group_of(source))
        self.wakeups.leave(source)
        return waited

    def listen(self, key: str, deliver: Callable[[bytes], None]) -> None:
        """Start popping the plain list of a transient queue.

        Args:
            key: Key of the list.
            deliver: Called with every message.
        """
        self._listeners[key] = TransientListener(key, deliver, self._pool)

    def unlisten(self, key: str) -> None:
        """Stop popping a plain list."""
        listener = self._listeners.pop(key, None)
        if listener is not None:
            listener.close()

    def connections(self) -> list[WatchedSocket]:
        """Return the connections that the event loop watches, with the readers of their answers."""
        found = [WatchedSocket("scripts", each, read) for each, read in self.pipeline.connections()]
        found += [
            WatchedSocket("wakeups", group.connection.connection, partial(self.read_wakeups, group))
            for group in self.wakeups
        ]
        found += [
            WatchedSocket("messages", listener.connection.watched, partial(self._read_messages, listener))
            for listener in self._listeners.values()
        ]
        return [each for each in found if each.connection is not None]

    @property
    def subscriptions(self) -> list[Subscription]:
        """The queues that are fetched from now."""
        return list(self._subscriptions.values())

    @property
    def _runs_suspect(self) -> bool:
        return self._suspect is not None and self._suspect in self._process.in_flight

    def look_again(self, prefix: str | None = None) -> None:
        """Look again at the partition with this prefix, or at all, although no wake-up came."""
        for name in tuple(self._subscriptions) if prefix is None else (prefix,):
            if name in self._subscriptions:
                self._ready.wake(self._subscriptions[name])

    def turn_at(self, source: Subscription, at: float) -> None:
        """Let the event loop turn at a monotonic time for this queue."""
        source.wake_at = at
        self._ready.plan(source)

    # -- called by the event loop ----------------------------------------------

    def tick(self) -> None:
        """Send the due claims, acks, handovers and waits. Called before every wait of the event loop.

        Raises:
            redis.RedisError: The connection broke.
        """
        now = self._process.clock.monotonic()
        self._ready.take_due(now, self._runs_suspect)
        # Most turns are of other events, such as the end of a task, and change nothing here.
        is_needed = self._ready.needs_capacity or self.wakeups.needs_capacity
        want, free = self._consumer.capacity() if self._subscriptions and is_needed else (0, 0)
        if self._ready.needing_slots:
            want = free  # messages claimed ahead would take the slots for which a tenant waits
        with self.pipeline.together:
            if want > 0:
                self._send_claims(want, free, now)
            elif self._ready.relied_on:
                for source in tuple(islice(self._ready.to_hand_over(), MAX_HANDOVERS)):
                    self.handovers.hand_over(source, now)
            if self.handovers.queued:
                self.handovers.send(now)
            self.pipeline.send_pending_acks(now)
        keeps = self._consumer.can_keep_next_look()
        self.wakeups.wait(now, may_wait=want > 0 and keeps is not None, in_loop=not keeps)
        for listener in tuple(self._listeners.values()):
            listener.tick(now)
        self.pipeline.check_alive(now)

    def next_deadline(self) -> float:
        """Return when :meth:`tick` must run even if nothing arrives, a monotonic time; infinity for never."""
        waiting = self._process.queues_with_acks()
        times = [self._ready.next_time(), self.wakeups.asks_at, *self.pipeline.settle_times(waiting)]
        times += [each.resumes_at for each in self._listeners.values() if each.waits_after_refusal]
        for queue, box in waiting:
            if box.finishes and queue.prefix in self._subscriptions:
                times.append(max(box.oldest_finish_at + RIDE_ALONG_S, self.pipeline.resumes_at(queue)))
        return min(times)

    @property
    def expects_answer(self) -> bool:
        """Whether a script is under way, whose answer comes soon in any case."""
        return len(self.pipeline) > 0

    def read_wakeups(self, group: WakeupListener) -> None:
        """Read the answer of a wait for wake-ups; called when the socket is readable.

        Raises:
            redis.RedisError: The connection broke, or the answer is an error.
        """
        for source in self.handovers.read(group):
            if self._consumer.capacity()[0] <= 0:
                # Another consumer may have a free slot. If due, the wake-up is stored again.
                self.handovers.hand_over(source, self._process.clock.monotonic())

    def _read_messages(self, listener: TransientListener) -> bool:
        message: bytes | None = None
        with self._process.refusals.watch("wait for replies") as outcome:
            message = listener.read()
        if outcome.refused:
            listener.resumes_at = self._process.clock.monotonic() + RETRY_AFTER_REFUSAL_S
        if message is None:
            return False
        listener.deliver(message)
        return True

    # -- claims ----------------------------------------------------------------

    def _send_claims(self, want: int, free: int, now: float) -> None:
        """Send claims that together bring at most *want* messages, besides those of the claims under way."""
        claims, all_free = self._claims, free
        want, free = want - claims.may_bring, max(free - claims.may_bring, 0)
        self._ready.end_backoffs(free)
        while (share := claims.share(want, len(self._ready))) > 0:
            source = self._ready.next_claimable(claims.may_lead)
            if source is None:
                return
            if source.queue.key in claims:  # it was cancelled and is consumed again
                self._ready.wake(source)
                return
            source.free_at_last_claim = all_free if free else 0
            asked = self._send_claim(source, share, min(free, share), now)
            want, free = want - asked, max(free - asked, 0)

    def _send_claim(self, source: Subscription, want: int, free: int, now: float) -> int:
        process, queue = self._process, source.queue
        if source.claim_limit is not None:
            want = min(want, source.claim_limit())
        with process.in_doubt.taking_acks(queue.key):
            may_take = self.pipeline.may_take_acks(queue)
            acks = process.in_flight.pending_acks(queue.key).take() if may_take else Acks()
            self._send_claim_with(acks, source, want, free, now)
        return want

    def _send_claim_with(self, acks: Acks, source: Subscription, want: int, free: int, now: float) -> None:
        process, queue = self._process, source.queue
        leads = self._claims.add(queue.key, want)
        source.is_claiming, source.is_woken, source.needs_lead = True, False, False
        call = queue.partition.claim(
            queue.consumer(process.consumer),
            lease_ms=process.lease_ms,
            want=want,
            free=free,
            hold=self._consumer.can_keep_next_look(),
            max_deliveries=queue.max_deliveries,
            suspects=leads and not self._runs_suspect,
            discards=self.discard_pace.room() if leads else 0,
            discard_rest_s=self.discard_pace.rest_s(),
            settle=tags(acks.settles),
            finish=tags(acks.finishes),
        )
        answer = partial(self._claimed, source, want, leads, now)
        self.pipeline.send(InFlightCall(call, queue, now, answer, acks))

    def _claimed(
        self,
        source: Subscription,
        want: int,
        leads: bool,
        sent_at: float,
        claimed: ClaimReply | ClaimFailure,
    ) -> None:
        process, ready = self._process, self._ready
        source.is_claiming = False
        is_gone = self._subscriptions.get(source.queue.prefix) is not source
        if isinstance(claimed, ClaimFailure):
            self._claims.answered(source.queue.key, None)
            # The next claim is sent at once. Redis may have assigned the next look with the failed claim.
            if is_gone:
                self.handovers.add(source)
                return
            self._ready.rely_on(source)
            if claimed.value:
                ready.pause(source, process.clock.monotonic() + claimed.value)
            if source.on_claimed is not None:
                source.on_claimed()
            return
        message_count = sum(not entry.reason for entry in claimed.entries)
        self._claims.answered(source.queue.key, message_count)
        if claimed.fenced:
            self._fenced(source, claimed.lost_up_to or 0)
            return
        if source.waits is None and not is_gone:
            self.handovers.restart_wait(self.wakeups.join(source))
        self.claimed_at = now = process.clock.monotonic()
        process.watchdog_strikes, source.has_limits = 0, claimed.has_limits
        (ready.needing_slots.discard if is_gone or not claimed.needs_slot else ready.needing_slots.add)(
            source
        )
        next_look_at = None if claimed.next_look_s is None else now + claimed.next_look_s
        if not is_gone:
            ready.looked(source, next_look_at)
            if claimed.more and not claimed.entries:
                # A claim that does not lead may have passed over suspects only because another one leads.
                ready.found_none(source, now, self._runs_suspect, needs_lead=not leads)
            else:
                source.reset_backoff()
                has_more = claimed.more or source.is_woken or message_count >= want
                (ready.wake if has_more else ready.rest)(source)
        elif next_look_at is not None:
            self.handovers.add(source)
        for entry, held in process.claimed(source.queue, claimed, sent_at):
            if held is None:
                # The entry is void. Another claim may find messages, and the next look may be lost.
                if not is_gone:
                    self._ready.rely_on(source)
                continue
            if is_gone:
                # The queue was cancelled while the claim was under way.
                process.in_flight.release(held.tag, "unstarted")
                continue
            if claimed.suspect:
                self._suspect = held.tag
            self._consumer.receive(source, entry, held.tag)
        if source.on_claimed is not None:
            source.on_claimed()

    def _fenced(self, source: Subscription, last_claim: int) -> None:
        """Handle a fenced claim: the queue has a later leader, or one that this process does not know."""
        self._ready.rest(source)
        if not source.queue.token:
            # Another BLPOP on this queue would take wake-ups away from the leader. The queue may become an
            # ordinary one.
            self._leave_wakeups(source)
            self._ready.pause(source, self._process.clock.monotonic() + self._process.lease_s)
        self._process.record_fenced(source.queue, last_claim)

    def read_all_answers(self) -> None:
        """Send the remaining handovers and wait for all answers, where no event loop would read them.

        Raises:
            redis.RedisError: The connection broke.
        """
        self.handovers.send(self._process.clock.monotonic())
        while len(self.pipeline):
            self.pipeline.read_all_answers()
            self.handovers.send(self._process.clock.monotonic())

    # -- pending acks ----------------------------------------------------------

    def _may_wait_for_claim(self, queue: Queue, box: PendingAcks, now: float) -> bool:
        """Return whether the pending finishes of *queue* may wait for its next claim."""
        source = self._subscriptions.get(queue.prefix)
        if source is None or now >= box.oldest_finish_at + RIDE_ALONG_S:  # the sum of `next_deadline`
            return False
        return source.may_have_work or (
            self._consumer.acks_may_wait and not source.is_end_awaited(box.finishes)
        )

    # -- closing ---------------------------------------------------------------

    def close(self) -> None:
        """Close all connections; unanswered acks become pending again."""
        for key in tuple(self._listeners):
            self.unlisten(key)
        self._claims = ClaimsUnderWay()
        self.handovers.close()
        for source in self._subscriptions.values():
            source.is_claiming = False
            self._ready.rely_on(source)
        self.pipeline.close()
        self.wakeups.close()
