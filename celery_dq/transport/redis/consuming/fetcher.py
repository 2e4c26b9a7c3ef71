"""Brings messages from Redis to one channel, without polling and without blocking.

Each channel has two connections. On one, a ``BLPOP`` waits for a *wake-up* of any consumed partition. The
other carries the scripts. The states of a consumed queue::

    idle ──wake-up, next look, new consumer──▶ may have work ──claim──▶ may have work, or idle

A queue *may have work* when a message of it may be eligible. The fetcher claims from it while the channel has
free capacity. The queue keeps this state as long as claims come back full or report more messages. An *idle*
queue waits for its wake-up.

The *next look* is the time at which the next delayed or throttled message is due. The claim script assigns it
to one consumer at a time. All other consumers rely on the consumer that took the wake-up or has the next
look. If that consumer has no free slot when the look is due, or stops, it hands the wake-up over to another
one.

Pending acks (settles, finishes) travel with the next claim of their partition, or alone when no claim is due.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from celery_dq.transport.redis.consuming.subscription import MIN_BACKOFF_S, Subscription
from celery_dq.transport.redis.consuming.wakeups import WakeupListener
from celery_dq.transport.redis.in_flight.ack_calls import MAX_ACKS_PER_CALL, tags
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.in_flight.in_flight_messages import RIDE_ALONG_S
from celery_dq.transport.redis.in_flight.script_pipeline import (
    RETRY_AFTER_REFUSAL_S,
    ClaimFailure,
    InFlightCall,
    ScriptPipeline,
)
from celery_dq.transport.redis.store.pipelined_connection import OVERDUE_S
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.replies import ClaimReply
from celery_dq.transport.redis.store.transient import TransientListener

if TYPE_CHECKING:
    from celery_dq.transport.redis.store.replies import ClaimedEntry

logger = logging.getLogger(__name__)


#: More pool slots than any worker has.
UNLIMITED = 1 << 30


class RedisFetcher:
    """The consuming side of one channel.

    Args:
        process: Consumer identity of the process, with its in-flight messages.
        pool: Pool of the connections that the event loop watches.
        room: Returns (want, free): the number of messages that the channel takes now, and the number of free
            pool slots among them.
        keeps_appointments: Returns whether the process can keep a next look while it works. None means that
            it is about to block, so that it may not even wait for a wake-up.
        deliver: Called with (source, entry, delivery tag) for every claimed message.
    """

    def __init__(
        self,
        process: ConsumerIdentity,
        pool: redis.ConnectionPool,
        room: Callable[[], tuple[int, int]],
        keeps_appointments: Callable[[], bool | None],
        deliver: Callable[[Subscription, ClaimedEntry, str], None],
    ) -> None:
        self._process = process
        self._capacity = room
        self._can_keep_next_look = keeps_appointments
        self._deliver = deliver
        self.pipeline = ScriptPipeline(process, pool, self._may_wait_for_claim)
        self.wakeups = WakeupListener(pool)
        self._pool = pool
        self._subscriptions: dict[str, Subscription] = {}
        self._rotation: deque[Subscription] = deque()
        self._claiming = False
        #: Queues whose wake-up must be handed over, with the number of handovers.
        self._handovers: list[tuple[Queue, int]] = []
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
    ) -> Subscription:
        """Start fetching from *queue*.

        Args:
            queue: The queue.
            limit: Returns the maximum number of messages to claim; see :class:`Subscription`.
            claimed: Called after each claim; see :class:`Subscription`.

        Returns:
            The subscription, which exists already for a queue that is fetched from.
        """
        source = self._subscriptions.get(queue.name)
        if source is None:
            source = self._subscriptions[queue.name] = Subscription(
                queue, claim_limit=limit, on_claimed=claimed
            )
            self._rotation.append(source)
        self._restart_wait()
        return source

    def unsubscribe(self, queue: str) -> Subscription | None:
        """Stop fetching from *queue*; the messages of a claim under way are released when it is answered.

        Returns:
            The subscription that ended; None without one.
        """
        source = self._subscriptions.pop(queue, None)
        if source is not None:
            self._rotation.remove(source)
            waited = self._restart_wait()
            if waited or source.is_relied_on or source.next_look_at is not None:
                self._queue_handover(source, 2 if waited else 1)
        return source

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

    def connections(self) -> Iterator[tuple[str, Any]]:
        """Yield the connections that the event loop watches, each after its kind."""
        connections = [("scripts", self.pipeline.connection), ("tokens", self.wakeups.connection)]
        connections += [("messages", listener.connection) for listener in self._listeners.values()]
        for kind, connection in connections:
            if connection.connection is not None:
                yield kind, connection.connection

    @property
    def subscriptions(self) -> list[Subscription]:
        """The queues that are fetched from now."""
        return list(self._subscriptions.values())

    @property
    def _is_idle(self) -> bool:
        """Whether no queue may have work, so that the channel must wait for a wake-up."""
        return not any(source.may_have_work for source in self._rotation)

    @property
    def _runs_suspect(self) -> bool:
        return self._suspect is not None and self._suspect in self._process.in_flight

    def look_again(self, queue: str | None = None) -> None:
        """Look again at *queue*, or at all queues, although no wake-up came."""
        for source in self._subscriptions.values():
            if queue is None or source.queue.name == queue:
                source.may_have_work = True

    # -- called by the event loop ----------------------------------------------

    def tick(self) -> None:
        """Send the due claims, acks, handovers and waits. Called before every wait of the event loop.

        Raises:
            redis.RedisError: The connection broke.
        """
        now = self._process.clock.monotonic()
        for source in self._rotation:
            if source.next_look_at is not None and source.next_look_at <= now:
                source.next_look_at = None
                source.may_have_work = source.is_relied_on = True
            if source.backoff_until and source.backoff_until <= now:
                source.backoff_until = 0.0
            elif source.backoff_s > MIN_BACKOFF_S and not self._runs_suspect:
                source.reset_backoff()
            if source.wake_at is not None and source.wake_at <= now:
                source.wake_at = None
        want, free = self._capacity() if self._rotation else (0, 0)
        if want > 0 and not self._claiming:
            claimable = self._next_claimable(now, free)
            if claimable is not None:
                self._send_claim(claimable, want, free, now)
        if want <= 0:
            for source in self._rotation:
                if source.is_relied_on:
                    self._hand_over_wakeup(source, now)
        self._send_handovers(now)
        self.pipeline.send_pending_acks(now)
        if self.wakeups.is_waiting:
            self.wakeups.check_alive(now)
        elif want > 0 and not self._claiming and self._is_idle and self._can_keep_next_look() is not None:
            self.wakeups.start_wait((source.queue for source in self._rotation), now)
        for listener in tuple(self._listeners.values()):
            listener.tick(now)
        oldest = self.pipeline.oldest_sent_at()
        # An unread answer means that this process was busy, not that the connection is dead.
        if (
            oldest is not None
            and now - oldest > OVERDUE_S
            and not self.pipeline.connection.has_unread_input()
        ):
            raise redis.ConnectionError(
                f"Redis has not answered a script for {now - oldest:.0f} s: the connection is dead"
            )

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which :meth:`tick` must run even if nothing arrives; None for none."""
        times = [source.next_look_at for source in self._rotation if source.next_look_at is not None]
        for source in self._rotation:
            if source.backoff_until:
                times.append(source.backoff_until)
            if source.wake_at is not None:
                times.append(source.wake_at)
            box = self._process.in_flight.pending_acks(source.queue.key)
            if box.finishes:
                times.append(max(box.oldest_finish_at + RIDE_ALONG_S, self.pipeline.paused_until))
        times += self.pipeline.settle_times()
        return min(times) if times else None

    @property
    def expects_answer(self) -> bool:
        """Whether a script is under way, whose answer comes soon in any case."""
        return len(self.pipeline) > 0

    def on_readable(self, fd: int) -> bool:
        """Read the answer that has arrived on *fd*.

        Args:
            fd: File descriptor of one of the :meth:`connections`.

        Returns:
            Whether a message was delivered to a consumer directly, as those of transient queues are.

        Raises:
            redis.RedisError: The connection broke, or a script failed.
        """
        if fd == self.wakeups.connection.fd:
            self._read_wakeup()
            return False
        if fd == self.pipeline.connection.fd:
            self.pipeline.read()
            return False
        return any(
            listener.read() for listener in tuple(self._listeners.values()) if listener.connection.fd == fd
        )

    # -- claims ----------------------------------------------------------------

    def _next_claimable(self, now: float, free: int) -> Subscription | None:
        for _ in range(len(self._rotation)):
            source = self._rotation[0]
            self._rotation.rotate(-1)
            if source.may_have_work and not source.is_backing_off(now, free):
                return source
        return None

    def _send_claim(self, source: Subscription, want: int, free: int, now: float) -> None:
        process, queue = self._process, source.queue
        if source.claim_limit is not None:
            want = min(want, source.claim_limit())
        settles, finishes = process.in_flight.take_acks(queue.key, MAX_ACKS_PER_CALL)
        call = queue.partition.claim(
            queue.consumer(process.consumer),
            lease_ms=process.lease_ms,
            want=want,
            free=free,
            hold=self._can_keep_next_look(),
            max_deliveries=queue.max_deliveries,
            suspects=not self._runs_suspect,
            discards=process.discard_pace.room(),
            discard_rest_s=process.discard_pace.rest_s(),
            settle=tags(settles),
            finish=tags(finishes),
        )
        self._claiming = True
        source.free_at_last_claim = free
        answer = partial(self._claimed, source, want, now)
        self.pipeline.send(InFlightCall(call, queue, now, answer, settles, finishes))

    def _claimed(
        self, source: Subscription, want: int, sent_at: float, claimed: ClaimReply | ClaimFailure
    ) -> None:
        self._claiming = False
        process = self._process
        if claimed is ClaimFailure.REFUSED:
            source.backoff_until, source.free_at_last_claim = (
                process.clock.monotonic() + RETRY_AFTER_REFUSAL_S,
                UNLIMITED,
            )
        is_gone = self._subscriptions.get(source.queue.name) is not source
        if isinstance(claimed, ClaimFailure):
            # The next claim is sent at once. Redis may have assigned the next look with the failed claim.
            source.is_relied_on = True
            if is_gone:
                self._queue_handover(source)
            elif source.on_claimed is not None:
                source.on_claimed()
            return
        if claimed.fenced:
            self._fenced(source, claimed.lost_up_to or 0)
            return
        self.claimed_at = now = process.clock.monotonic()
        process.watchdog_strikes = 0
        message_count = sum(not entry.reason for entry in claimed.entries)
        source.may_have_work = claimed.more or message_count >= want
        if claimed.more and not claimed.entries:
            source.back_off(now, self._runs_suspect)
        else:
            source.reset_backoff()
        source.next_look_at = None if claimed.next_look_s is None else now + claimed.next_look_s
        source.is_relied_on = False
        if is_gone and source.next_look_at is not None:
            self._queue_handover(source)
        for entry, held in process.claimed(source.queue, claimed, sent_at):
            if held is None:
                # The entry is void. Another claim may find messages, and the next look may be lost.
                source.may_have_work = source.is_relied_on = True
                continue
            if is_gone:
                # The queue was cancelled while the claim was under way.
                process.in_flight.release(held.tag, "unstarted")
                continue
            if claimed.suspect:
                self._suspect = held.tag
            self._deliver(source, entry, held.tag)
        if source.on_claimed is not None:
            source.on_claimed()

    def _fenced(self, source: Subscription, last_claim: int) -> None:
        """Handle a fenced claim: the queue has a later leader, or one that this process does not know."""
        source.may_have_work = False
        if not source.queue.token:
            # Another BLPOP on this queue would take wake-ups away from the leader.
            self.unsubscribe(source.queue.name)
        self._process.record_fenced(source.queue, last_claim)

    # -- handing wake-ups over -------------------------------------------------

    def _hand_over_wakeup(self, source: Subscription, now: float, times: int = 1) -> None:
        """Hand the wake-up and the next look over to another consumer, for lack of a free slot."""
        if not source.queue.token:  # a singleton queue has no other consumer
            source.next_look_at, source.is_relied_on = None, False
            self.pipeline.hand_over_wakeup(source.queue, now, times)

    def _queue_handover(self, source: Subscription, times: int = 1) -> None:
        # `tick` or `read_all_answers` sends it, where a broken connection is handled.
        if not source.queue.token and self.pipeline.connection.connection is not None:
            self._handovers.append((source.queue, times))

    def _send_handovers(self, now: float) -> None:
        """Send the handovers of the queues that this channel no longer consumes."""
        while self._handovers:
            queue, times = self._handovers.pop()
            self.pipeline.hand_over_wakeup(queue, now, times)

    def hand_over_before_blocking(self) -> None:
        """Hand all wake-ups and next looks over, because a callback is about to block the loop.

        Raises:
            redis.RedisError: The connection broke.
        """
        waited = self._restart_wait()
        now = self._process.clock.monotonic()
        for source in self._rotation:
            if waited or source.is_relied_on or source.next_look_at is not None:
                self._hand_over_wakeup(source, now, 2 if waited else 1)
        if self.pipeline.hands_over_wakeup():
            # The loop stops. A second handover waits for an answer, and one whose script Redis does not know.
            self.pipeline.read_all_answers()

    def read_all_answers(self) -> None:
        """Send the remaining handovers and wait for all answers, where no event loop would read them.

        Raises:
            redis.RedisError: The connection broke.
        """
        self._send_handovers(self._process.clock.monotonic())
        while len(self.pipeline):
            self.pipeline.read_all_answers()
            self._send_handovers(self._process.clock.monotonic())

    # -- pending acks ----------------------------------------------------------

    def _may_wait_for_claim(self, queue: Queue, now: float) -> bool:
        """Return whether the pending finishes of *queue* may wait for its next claim."""
        source = self._subscriptions.get(queue.name)
        if source is None or not source.may_have_work:
            return False
        box = self._process.in_flight.pending_acks(queue.key)
        return now - box.oldest_finish_at < RIDE_ALONG_S

    # -- wake-ups --------------------------------------------------------------

    def _restart_wait(self) -> bool:
        """Cancel the wait, because the set of consumed queues has changed.

        Returns:
            Whether a ``BLPOP`` was under way.
        """
        waited = self.wakeups.cancel_wait()
        if waited:
            # A wake-up may have been lost with the connection.
            self.look_again()
        return waited

    def _read_wakeup(self) -> None:
        queue = self.wakeups.read_wakeup()
        source = self._subscriptions.get(queue) if queue is not None else None
        if source is None:
            return
        source.may_have_work = source.is_relied_on = True
        if self._capacity()[0] <= 0:
            # Another consumer may have a free slot. The script stores the wake-up again if it is due.
            self._hand_over_wakeup(source, self._process.clock.monotonic())

    # -- closing ---------------------------------------------------------------

    def close(self) -> None:
        """Close all connections; unanswered acks become pending again."""
        for key in tuple(self._listeners):
            self.unlisten(key)
        self._claiming = False
        self._handovers.clear()
        for source in self._rotation:
            source.may_have_work = source.is_relied_on = True
        self.pipeline.close()
        self.wakeups.close()
