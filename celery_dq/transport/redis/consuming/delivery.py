"""The delivering side of a channel: its consumers, its inbox, and the gates before a callback.

The consumer thread claims messages into the *inbox*. The thread that runs Celery's event loop, or calls
``drain_events``, delivers from there. Messages in the inbox are in flight under the lease of the process.

In a worker, only delivered messages count against Celery's prefetch count. The inbox may hold more: as many
as fit the claim-ahead time. If a worker delivers nothing for some time, the consumer thread releases its
inbox to other consumers. In plain kombu, the inbox counts against the prefetch count, and is released after
half a lease.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from celery_dq.errors import CorruptRecord
from celery_dq.native import unpatched
from celery_dq.protocols import Leaderships, PartitionAllocation, WorkerCapacity
from celery_dq.shown import shown_logger
from celery_dq.transport.in_flight import InFlightMessage, Message
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming import channel_claims
from celery_dq.transport.redis.consuming.channel_claims import (
    MAX_CLAIM,
    CallbackPace,
    ChannelClaims,
    ClaimWindow,
    DiscardPace,
)
from celery_dq.transport.redis.consuming.singleton_delivery import SingletonDelivery
from celery_dq.transport.redis.consuming.subscriptions import Subscription
from celery_dq.transport.redis.store.partition import PartitionedQueue, Queue
from celery_dq.transport.redis.store.partition_map import PartitionMaps

if TYPE_CHECKING:
    from celery_dq.transport.redis.consuming.consumer_thread import ConsumerThread
    from celery_dq.transport.redis.consuming.consumer_threads import ConsumerThreads

logger = shown_logger(__name__)

#: Seconds without a delivery, beside twice the claim-ahead time, after which a worker's inbox is overdue.
OVERDUE_S = 0.1
#: Seconds from which on a callback in the delivering thread counts as long: a claim takes less.
LONG_CALLBACK_S = 0.001
#: Longest wait in seconds for the consumer thread, when a consumer or a channel ends.
END_TIMEOUT_S = 5.0
#: Seconds for which a queue keeps its turn. Messages may wait for many times as long after their claim.
TURN_S = 0.002
#: Longest delay, in seconds, with which an idle delivering thread turns after a wake-up. A longer one means
#: that it was busy.
PROMPT_S = 2.0


class ChannelDelivery:
    """The consumers of one channel.

    Args:
        channel: The channel, for its prefetch count, worker capacity and client.
        identity: Consumer identity of the process, with its in-flight messages.
        claim_ahead_s: Service time that may be claimed ahead, in seconds.
        watchdog_s: Seconds without a claim, despite a backlog, after which the connection is suspected to be
            dead; 0 means never.
    """

    def __init__(
        self, channel: Any, identity: ConsumerIdentity, claim_ahead_s: float, watchdog_s: float
    ) -> None:
        self._channel = channel
        self._identity = identity
        self._claim_ahead_s = claim_ahead_s
        self.watchdog = Watchdog(identity, watchdog_s)
        self._threads: ConsumerThreads = identity.threads
        #: Held while a thread decides how many messages to claim.
        self.lock = unpatched("_thread", "allocate_lock")()
        #: Decides how many discards a claim takes besides its messages.
        self.discard_pace = DiscardPace(identity.clock)
        #: See :class:`Inboxes`.
        self.suspect: str | None = None
        #: The claims of the main thread.
        self.claims = ChannelClaims(identity, self._threads.main, self, channel.wakeups_class)
        #: All claims, by their thread. Only that thread adds and removes its own.
        self._claims = {self._threads.main: self.claims}
        self._is_attached = False
        #: Messages that the consumer thread has claimed, on their way into the inbox.
        self._arrivals: deque[Message] = deque()
        self._inbox = Inbox()
        #: Whether a message is between the inbox and the pool, and its delivery tag when that is known.
        self._handing: str | None = None
        #: What came by broadcasts and transient queues, each with the function that delivers it.
        self.others: deque[Callable[[], object]] = deque()
        self._consumers = PartitionConsumers()
        #: The partitions on which the consumers keep a lease, by the prefix of their keys.
        self._leased: dict[str, Queue] = {}
        #: How long callbacks take that run in the delivering thread.
        self.pace = CallbackPace(identity.clock, claim_ahead_s)
        self._window = ClaimWindow(claim_ahead_s)
        #: Monotonic time since which the inbox holds messages.
        self._filled_at = self.pace.delivered_at
        #: Whether nothing is claimed before the next delivery, because messages have waited for one too long.
        self._rests = False
        #: Whether a program without a worker waits for messages now.
        self.is_asked = False
        self._capacity: WorkerCapacity | None = None
        self._runs_in_loop = True
        #: Restricts the consumers to the allocated partitions; None without an allocation.
        self.allocated_partitions: AllocatedPartitions | None = None
        #: Delivery of the singleton queues; None while the channel consumes none.
        self.singleton_delivery: SingletonDelivery | None = None
        #: See :class:`Inboxes`. Messages of singleton queues wait for one another.
        self.awaits_ends = False
        #: The error that has ended the connection.
        self.failure: Exception | None = None

    # -- consumers -------------------------------------------------------------

    def attach(self) -> None:
        """Let the consumer thread serve this channel, from the first consumer on."""
        if not self._is_attached:
            self._is_attached = True
            # The worker sets its capacity before it consumes. Each look-up would cost a system call.
            self._capacity = self._channel.capacity
            self._runs_in_loop = self._capacity is None or self._capacity.runs_tasks_in_loop
            self._threads.main.attach(self.claims, self._channel.thread_clients)

    def start_consumers(self, consumers: Sequence[QueueConsumer]) -> None:
        """Start consumers of queues; several consumers of one partition take turns."""
        self.attach()
        self.claims.has_queues = True
        allocation = self._channel.context.allocation
        if allocation is not None and self.allocated_partitions is None:
            self.allocated_partitions = AllocatedPartitions(allocation, self._identity.partition_maps)
            allocation.add_listener(self._channel.wake_delivery)
        begun: list[Queue] = []
        for consumer in consumers:
            if self.allocated_partitions is not None:
                self.allocated_partitions.report(consumer.queue)
            begun += self._consumers.add(consumer, self._partitions_of(consumer.queue))
        self._start_claims(begun)

    def _partitions_of(self, queue: PartitionedQueue) -> Sequence[Queue]:
        """Return the partitions of a queue to consume: all of them, or those allocated to this worker."""
        allocated = self.allocated_partitions
        return queue.partitions if allocated is None else allocated.of(queue)

    def _start_claims(self, partitions: Sequence[Queue]) -> None:
        leaderships = self._channel.context.leaderships
        begun: dict[ConsumerThread, list[tuple[Queue, bool]]] = {}
        for partition in partitions:
            if leaderships is not None and leaderships.is_singleton(partition.name):
                self._threads.request(partial(self._start_singleton, leaderships, partition))
            else:
                self._leased[partition.prefix] = partition
                thread = self._threads.keep_lease(partition, self._channel.thread_clients)
                begun.setdefault(thread, []).append((partition, self._channel.ahead.was_empty(partition)))
        for thread, queues in begun.items():
            # Together: each queue that joins a wait under way ends it, and costs a claim of each other one.
            thread.request(partial(self._subscribe, thread, queues))

    def _subscribe(self, thread: ConsumerThread, queues: Sequence[tuple[Queue, bool]]) -> None:
        """Start claiming from partitions, in the thread that is to have them.

        Args:
            thread: This thread.
            queues: The partitions, each with whether it stored no message a moment ago.
        """
        for queue, is_empty in queues:
            if self._threads.of(queue) is not thread:
                thread.follow_slots_soon()
            if self._consumers.has(queue.prefix):  # it may have ended meanwhile
                self._claims_of(thread).subscribe(queue, is_empty=is_empty)

    def _claims_of(self, thread: ConsumerThread) -> ChannelClaims:
        claims = self._claims.get(thread)
        if claims is None:
            claims = ChannelClaims(self._identity, thread, self, self._channel.wakeups_class)
            self._claims[thread] = claims
            thread.serve(claims)
        return claims

    def place(self, claims: ChannelClaims, subscription: Subscription) -> None:
        """Hand a subscription over to the thread that is to have its queue."""
        thread, queue = self._threads.of(subscription.queue), subscription.queue
        if thread is not claims.thread:
            claims.give_up(subscription)
            thread.request(partial(self._subscribe, thread, [(queue, False)]))
            if not claims.subscriptions and claims is not self.claims:
                self._end_claims_of(claims)

    def _end_claims_of(self, claims: ChannelClaims) -> None:
        """End the claims of a thread, in that thread."""
        claims.thread.detach(claims)
        claims.close()
        self._claims.pop(claims.thread, None)

    def stop_consumer(self, tag: str) -> None:
        """Stop one consumer. Where it was the last one, undelivered messages are released."""
        if ended := self._consumers.remove(tag):
            self._end_claims(ended)

    def follow_partitions(self, queue_now: Callable[[PartitionedQueue], PartitionedQueue | None]) -> None:
        """Let each consumer consume its queue as it is now; None stands for a partition that has gone."""
        for consumer in self._consumers.all:
            now = queue_now(consumer.queue)
            changed = now is not None and now.homes != consumer.queue.homes
            if changed and now is not None and self.allocated_partitions is not None:
                self.allocated_partitions.report(now)
            partitions = () if now is None else self._partitions_of(now)
            begun, ended = self._consumers.assign(consumer, partitions)
            if now is not None and changed:
                consumer.queue = now
                for each in partitions:  # the consumer thread learns their number
                    self._threads.keep_lease(each, self._channel.thread_clients)
                    self._threads.drop_lease(each, soon=False)
            self._start_claims(begun)
            if ended:
                self._end_claims(ended)

    def _end_claims(self, ended: Sequence[Queue]) -> None:
        """End the claims from partitions without a consumer, and release their undelivered messages."""

        def unsubscribe(claims: ChannelClaims) -> None:
            for partition in ended:
                is_singleton = (
                    self.singleton_delivery is not None and partition.name in self.singleton_delivery
                )
                if is_singleton and claims is self.claims and self.singleton_delivery is not None:
                    self.singleton_delivery.remove(partition.name)
                elif not is_singleton:
                    claims.unsubscribe(partition.prefix)

        # Afterwards no claim is under way, so that the inbox gets no more messages of these partitions.
        # A thread without these partitions is not waited for: its master may hang.
        has_them = [
            claims for claims in tuple(self._claims.values()) if any(each.prefix in claims for each in ended)
        ]
        self._run_in_each(unsubscribe, awaited=[self.claims, *has_them])
        prefixes = {each.prefix for each in ended}
        self._collect()
        for message in self._inbox.take_partitions(prefixes):
            self._release(message)
        self.flush()
        for each in ended:
            if (leased := self._leased.pop(each.prefix, None)) is not None:
                self._threads.drop_lease(leased)

    def begin_asking(self) -> None:
        """Note that the program waits for messages from now on."""
        self.pace.end()
        self.is_asked, self._rests = True, False
        if not (self._arrivals or self._inbox.waiting):
            self._threads.wake()

    def flush(self, held: InFlightMessage | None = None) -> bool:
        """Wait until the broker has confirmed the acks, or does not answer; return whether it has.

        Args:
            held: The message whose ack is waited for; None for all.
        """
        return self._threads.flush(END_TIMEOUT_S if self.failure is None else 0.0, held)

    def _start_singleton(self, leaderships: Leaderships, queue: Queue) -> None:
        if self.singleton_delivery is None:
            self.singleton_delivery = SingletonDelivery(
                self._identity,
                leaderships,
                claims=self.claims,
                clients=self._channel.thread_clients,
                deliver=self._put_in_inbox,
                release=self._release,
                claim_ahead_s=self._claim_ahead_s,
                in_turn=self._singleton_window,
            )
            self.awaits_ends = True
            self._identity.on_fenced = lambda queue: leaderships.report_fenced(queue.name, queue.token)
            leaderships.add_listener(self._threads.main.wake)
        self.singleton_delivery.add(queue)

    # -- called by the consumer threads ----------------------------------------------

    def capacity(self, claims: ChannelClaims) -> tuple[int, int]:
        """Return how many messages these claims may bring, and how many of them fit free pool slots."""
        if len(self._claims) == 1:
            return self._room(0)
        others = self._others_of(claims)
        now = self._identity.clock.monotonic()
        want, free = self._room(sum(each.may_bring(now) for each in others))
        # The masters whose turn is longer ago get their shares, by the number of queues that may have work.
        ready = len(claims.ready)
        total = ready + sum(len(each.ready) for each in others if each.asked_at <= claims.asked_at)
        return -(-want * ready // total) if ready else want, -(-free * ready // total) if ready else free

    def _others_of(self, claims: ChannelClaims) -> list[ChannelClaims]:
        """Return the claims of the other threads."""
        return [each for each in tuple(self._claims.values()) if each is not claims]

    def has_room(self, claims: ChannelClaims) -> None:
        """Let other claims use the capacity that these have not used."""
        if len(self._claims) > 1:
            for each in self._others_of(claims):
                if each.ready.has_claimable:
                    each.thread.wake()

    def _room(self, may_come: int) -> tuple[int, int]:
        """Return how many messages to claim, and how many of them fit free pool slots.

        Args:
            may_come: Number of messages that claims under way may bring.
        """
        qos, capacity = self._channel.qos, self._capacity
        if self._channel.closed or self.failure is not None:
            return 0, 0
        undelivered = may_come
        if self._arrivals or self._inbox.waiting:
            undelivered += self._inbox.message_count + self._arrived
        is_handing = self._handing is not None
        if is_handing and (runs_s := self._callback_runs_s()) > LONG_CALLBACK_S:
            # An urgent message would wait behind all that is claimed ahead.
            is_late = (
                self._rests or runs_s > self._claim_ahead_s or (capacity is not None and capacity.closing)
            )
            return (0, 0) if is_late or undelivered or not qos.can_consume() else (1, 0)
        if is_handing:
            undelivered += self._is_handing(qos, capacity)
        if capacity is not None:
            return self._window.room(capacity, qos, undelivered)
        allowed = qos.can_consume_max_estimate()
        # A program without a prefetch count gets messages only while it waits for them.
        if self._rests or allowed == 0 or (allowed is None and not self.is_asked):
            return 0, 0
        want = max((self.pace.messages_ahead() if allowed is None else allowed) - undelivered, 0)
        return min(want, MAX_CLAIM), min(want, MAX_CLAIM)

    def _callback_runs_s(self) -> float:
        """Return for how many seconds the delivering thread runs a callback that does its work there."""
        if not self._runs_in_loop:
            return 0.0
        return self._identity.clock.monotonic() - self.pace.delivered_at

    def hands_over_at(self) -> float:
        """Return the monotonic time from which wake-ups without a free slot are handed over."""
        if not self._runs_in_loop or self._handing is None:
            return -math.inf
        # To hand each over behind a brief callback would cost a script for each queue and message.
        return self.pace.delivered_at + channel_claims.BRIEF_AHEADS * self._claim_ahead_s

    @property
    def _arrived(self) -> int:
        arrivals = self._arrivals
        return sum(not message.discard for message in tuple(arrivals)) if arrivals else 0

    def _is_handing(self, qos: Any, capacity: WorkerCapacity | None) -> bool:
        """Return whether a message has left the inbox, and neither the pool nor the prefetch count has it."""
        tag = self._handing
        if tag is None:
            return False
        return not qos.counts(tag) if capacity is None else tag not in capacity.running_tags()

    def _singleton_window(self) -> int:
        """Return how many messages of a singleton queue may be delivered at a time."""
        most = 1 if self._capacity is None else self._capacity.singleton_window
        limit = self._channel.qos.prefetch_count
        return min(most, limit) if limit else most

    def receive(self, subscription: Subscription, entry: ClaimedEntry, held: InFlightMessage) -> None:
        """Make a message of a claimed entry, and put it into the inbox."""
        channel = self._channel
        try:
            message = Message(
                MessageRecord.unpack(entry.record), entry, held.tag, subscription.queue.name, channel
            )
            message.prefix = subscription.queue.prefix
        except CorruptRecord as exc:
            channel.qos.dead_letter_unreadable(subscription.queue.name, entry, held.tag, exc)
            return
        held.has_lock = bool(message.record.dedup)
        if subscription.queue.token and self.singleton_delivery is not None:
            self.singleton_delivery.add_message(message)
        else:
            self._put_in_inbox(message)

    def _put_in_inbox(self, message: Message) -> None:
        message.claimed_at = self._identity.clock.monotonic()
        if not (self._arrivals or self._inbox.waiting):
            self._filled_at = message.claimed_at
        self._arrivals.append(message)

    def receive_other(self, deliver: Callable[[], object]) -> None:
        """Take a broadcast or a transient message, which *deliver* brings to its consumer."""
        self.others.append(deliver)
        self._channel.wake_delivery()

    def before_trip(self, claims: ChannelClaims, now: float) -> float:
        """Release what waits too long, follow the leaderships; return when to do so again."""
        if claims is not self.claims:
            return math.inf
        if self.singleton_delivery is not None:
            self.singleton_delivery.follow_leaderships()
        if not (self._arrivals or self._inbox.waiting):
            return math.inf
        if self.singleton_delivery is not None and not self._releasable():
            return math.inf
        overdue_at = self._overdue_after()
        if overdue_at > now:
            return overdue_at
        self._release_overdue()
        return math.inf

    def after_trip(self, claims: ChannelClaims) -> None:
        """Wake the delivery if a message may be delivered or started."""
        is_startable = False
        if self.singleton_delivery is not None and claims is self.claims:
            self.singleton_delivery.follow_leaderships()
            is_startable = self.has_startable
        if self.has_undelivered or is_startable or (self._consumers and self._channel.has_new_partitions):
            self._channel.wake_delivery()

    def fail(self, error: Exception) -> None:
        """Let the delivery raise an error."""
        self.failure = error
        self._channel.wake_delivery()

    # -- from inbox to callback ------------------------------------------------

    def _collect(self) -> None:
        """Move what has arrived into the inbox."""
        arrivals = self._arrivals
        while arrivals:
            # A message is in both for a moment, so that the consumer thread never counts one too few.
            message = arrivals[0]
            self._inbox.add(message)
            with contextlib.suppress(ValueError):  # the consumer thread has released it
                arrivals.remove(message)

    @property
    def has_undelivered(self) -> bool:
        """Whether something may be delivered now. Discards need no prefetch count."""
        if self.others or self.failure is not None:
            return True
        return bool(self._arrivals or self._inbox.waiting) and self._may_deliver()

    def _may_deliver(self) -> bool:
        return self._window.may_deliver(self._capacity, self._channel.qos) or not (
            self._arrived or self._inbox.has_messages
        )

    @property
    def has_startable(self) -> bool:
        """Whether a delivered message of a singleton queue may start, because its predecessor is over."""
        delivery, capacity = self.singleton_delivery, self._capacity
        if delivery is None:
            return False
        if delivery.finished_tags:
            delivery.finished_tags = [
                tag for tag in delivery.finished_tags if capacity is not None and capacity.awaits_end_of(tag)
            ]
        if delivery.predecessors_unknown:
            delivery.predecessors_unknown = capacity is not None and capacity.has_startable
        return bool(delivery.finished_tags) or delivery.predecessors_unknown

    def start_ready(self) -> None:
        """Start the delivered messages that have waited for the end of another one."""
        if self._capacity is not None and self.has_startable:
            self._capacity.start_ready()

    def deliver_one(self) -> bool:
        """Deliver the next message, if one may be delivered; return whether a consumer received it."""
        if self._runs_in_loop:
            self.pace.end()
        self._rests = False
        if self.others:
            return bool(self.others.popleft()())
        while (self._arrivals or self._inbox.waiting) and self._may_deliver():
            self._collect()
            self._handing = ""
            try:
                if self._deliver_next():
                    return True
            finally:
                self._handing = None
        return False

    def _deliver_next(self) -> bool:
        message = self._inbox.take_next(self._identity.clock.monotonic())
        if message is None:
            return False
        self.pace.begin(self._runs_in_loop)
        channel = self._channel
        tag: str = message.delivery_tag
        held = channel.in_flight.get(tag)
        capacity = self._capacity
        closing = capacity is not None and capacity.closing
        # Where a delivered message runs at once, its predecessor must be over.
        may = message.may_start if self._runs_in_loop else message.may_deliver
        if held is None or not self._consumers.has(message.prefix) or closing or not may():
            # The lease or the term may be lost, so another worker may already have the message.
            self._release(message)
            self._look_again(message.prefix)
            return False
        channel.qos.append(message, tag)
        self._handing = tag
        if message.discard:
            with self.discard_pace.timed():
                return self._discard(message)
        self._window.delivered(self.pace.delivered_at - message.claimed_at)
        consumer = self._consumers.next_for(message.prefix)
        message.delivery_info["consumer_tag"] = consumer.tag
        message.started = held.delivered = capacity is None
        if consumer.no_ack:
            channel.qos.forget(tag)
            channel.in_flight.finish(tag)
        self.watchdog.consumer_busy()
        try:
            consumer.callback(message)
        finally:
            self.watchdog.consumer_idle()
            if capacity is not None:
                # A program without a worker may use the message after its callback, until it drains again.
                self.pace.end()
            else:
                # It has its message. What is claimed from now on could overtake this one when it is requeued.
                self.is_asked = False
            if not (self._arrivals or self._inbox.waiting):
                for thread in tuple(self._claims):
                    thread.has_room()
        return True

    def _look_again(self, prefix: str) -> None:
        for thread, claims in tuple(self._claims.items()):
            if prefix in claims:
                thread.request(partial(claims.look_again, prefix))

    def _discard(self, message: Message) -> bool:
        capacity = self._capacity
        if capacity is not None and capacity.deliver_discard(message, message.discard):
            return True
        logger.info(
            "Message %s of queue %s was discarded without running: %s.",
            message.message_id,
            message.queue,
            message.discard,
            extra={"event": "message_discarded", "queue": message.queue, "reason": message.discard},
        )
        self._channel.qos.forget(message.delivery_tag)
        self._channel.in_flight.finish(message.delivery_tag)
        return False

    # -- releasing -------------------------------------------------------------

    def _release(self, message: Message) -> None:
        self._channel.qos.forget(message.delivery_tag)
        self._channel.in_flight.release(message.delivery_tag, "unstarted")

    def _release_arrivals(self, names: Sequence[str] | None = None) -> None:
        """Release the messages that have arrived and are not in the inbox, the youngest first."""
        for message in reversed(tuple(self._arrivals)):
            if names is None or message.queue in names:
                with contextlib.suppress(ValueError):
                    self._arrivals.remove(message)
                    self._release(message)

    def _overdue_after(self) -> float:
        """Return the monotonic time until which messages may wait in the inbox."""
        longest_s = self._identity.lease_s / 2
        # A program without a worker may pause between two messages, but waits for none during a callback.
        if self._capacity is not None or self._handing is not None:
            longest_s = min(longest_s, 2 * self._claim_ahead_s + OVERDUE_S)
        return max(self.pace.delivered_at, self._filled_at) + longest_s

    def _release_overdue(self) -> None:
        """Release the inbox, and claim nothing ahead before the next delivery."""
        self._window.close()
        self._rests = True
        self._filled_at = self._identity.clock.monotonic()
        names = self._releasable()
        self._release_arrivals(names)
        for name in names:
            for message in self._inbox.take_all(name):
                self._release(message)

    def _releasable(self) -> list[str]:
        """The queues in the inbox whose messages other workers may run: no singleton queues, in this term."""
        singleton = self.singleton_delivery
        names = {*self._inbox.queues(), *(message.queue for message in tuple(self._arrivals))}
        return [name for name in names if singleton is None or name not in singleton]

    def check_consumption(self, claims: ChannelClaims, now: float) -> None:
        """Check, after each round of renewals, whether this consumer still consumes."""
        if self.allocated_partitions is not None:
            self.allocated_partitions.allocation.broker_answered()
        ignores_backlog = partial(self._ignores_backlog, claims)
        if self.watchdog.is_suspicious(now, claims.claimed_at, ignores_backlog, self._runs_in_loop):
            self._channel.wake_delivery()

    def _ignores_backlog(self, claims: ChannelClaims) -> bool:
        """Return whether a wake-up is stored for a consumed queue, although the channel has capacity.

        Singleton queues do not count: their wake-up may wait for a running message or for a retry to be due.
        """
        if self.capacity(claims)[0] <= 0:
            return False
        queues = [subscription.queue for subscription in claims.subscriptions if not subscription.queue.token]
        return claims.thread.has_unclaimed_wakeup(queues)

    # -- closing ---------------------------------------------------------------

    def close(self) -> None:
        """Release undelivered messages, and stop all consumers."""
        if self.singleton_delivery is not None and (leaderships := self._channel.context.leaderships):
            leaderships.remove_listener(self._threads.main.wake)
        if self.allocated_partitions is not None:
            self.allocated_partitions.allocation.remove_listener(self._channel.wake_delivery)
        self._collect()
        for message in self._inbox.take_all():
            self._release(message)
        if self._consumers:
            ended = [queue for each in self._consumers.all for queue in self._consumers.remove(each.tag)]
            self._end_claims(ended)
        if self._is_attached:
            self._run_in_each(self._end_claims_of, awaited=tuple(self._claims.values()))

    def _run_in_each(
        self, action: Callable[[ChannelClaims], None], awaited: Collection[ChannelClaims]
    ) -> None:
        """Run an action with the claims of each thread, in that thread, and wait for some of the threads."""
        begun = [
            (claims, thread.begin_between_trips(partial(action, claims)))
            for thread, claims in tuple(self._claims.items())
        ]
        self._threads.wait_for_all([wait for claims, wait in begun if claims in awaited], END_TIMEOUT_S)


class Inbox:
    """The messages that one channel has claimed and not yet delivered.

    One thread adds and takes messages. The consumer thread may release all of them at the same time. It
    empties the deques, and removes no entry of the dictionaries.
    """

    def __init__(self) -> None:
        #: Messages by queue, then by tenant (None for discards). The first entry has the next turn. Deques
        #: that the consumer thread has emptied still count, because this is looked at many times per message.
        self.waiting: dict[str, dict[str | None, deque[Message]]] = {}
        #: By queue, the tenant that had the last turn and has more messages. It moves to the end when the
        #: next message is taken, behind all tenants that were added since.
        self._served: dict[str, str | None] = {}
        #: The queue whose turn it is, and the monotonic time at which its turn began.
        self._turn: tuple[str, float] = ("", 0.0)

    def __len__(self) -> int:
        return sum(len(line) for lines in tuple(self.waiting.values()) for line in tuple(lines.values()))

    @property
    def has_messages(self) -> bool:
        """Whether the inbox holds a message that is not a discard."""
        for lines in tuple(self.waiting.values()):
            for name, line in tuple(lines.items()):
                if line and name is not None:
                    return True
        return False

    @property
    def message_count(self) -> int:
        """The number of messages in the inbox, without the discards."""
        count = 0
        for lines in tuple(self.waiting.values()):
            for name, line in tuple(lines.items()):
                if name is not None:
                    count += len(line)
        return count

    def queues(self) -> tuple[str, ...]:
        """Return the names of the queues of which the inbox holds messages."""
        return tuple(name for name, lines in tuple(self.waiting.items()) if any(tuple(lines.values())))

    def add(self, message: Message) -> None:
        """Append *message* to those of its tenant or singleton queue, or to the discards of its queue."""
        tenant = message.record.tenant if message.permit is None else ""
        name = None if message.discard else tenant
        lines = self.waiting.get(message.queue)
        if lines is None:
            lines = self.waiting[message.queue] = {}
        line = lines.get(name)
        if line is None:
            line = lines[name] = deque()
        line.append(message)

    def take_next(self, now: float) -> Message | None:
        """Remove and return the oldest message of the next tenant of the next queue; None when empty.

        Args:
            now: Monotonic time.
        """
        while self.waiting:
            queue, lines = next(iter(self.waiting.items()))
            if queue == self._turn[0] and now >= self._turn[1] + TURN_S and len(self.waiting) > 1:
                self.waiting[queue] = self.waiting.pop(queue)  # to the end
                queue, lines = next(iter(self.waiting.items()))
            served = self._served.pop(queue, None) if len(lines) > 1 else None
            if served is not None:
                lines[served] = lines.pop(served)
            while lines:
                tenant, line = next(iter(lines.items()))
                if tenant is None and len(lines) > 1:
                    lines[None] = lines.pop(None)
                    continue
                try:
                    message = line.popleft()
                except IndexError:  # the consumer thread has released it
                    self._served.pop(queue, None)
                    del lines[tenant]
                    continue
                if queue != self._turn[0]:
                    self._turn = (queue, now)
                if line:
                    self._served[queue] = tenant
                else:
                    self._served.pop(queue, None)
                    del lines[tenant]
                    if not lines:
                        self._remove(queue)
                return message
            self._remove(queue)
        return None

    def _remove(self, queue: str) -> None:
        """Remove a queue without messages, whose turn is over."""
        del self.waiting[queue]
        if queue == self._turn[0]:
            self._turn = ("", 0.0)

    def take_partitions(self, prefixes: Collection[str]) -> Iterator[Message]:
        """Remove and yield the messages of some partitions; per tenant, the youngest first.

        Args:
            prefixes: The prefixes of the keys of the partitions.
        """
        for lines in tuple(self.waiting.values()):
            for line in tuple(lines.values()):
                for message in reversed(tuple(line)):
                    if message.prefix in prefixes:
                        # The consumer thread may take it, or change the deque meanwhile.
                        with contextlib.suppress(ValueError, IndexError):
                            line.remove(message)
                            yield message

    def take_all(self, queue: str | None = None) -> Iterator[Message]:
        """Remove and yield all messages, or those of one queue; per tenant, the youngest first."""
        for name in self.queues() if queue is None else (queue,):
            for line in tuple(self.waiting.get(name, {}).values()):
                while line:
                    with contextlib.suppress(IndexError):  # the consuming thread was faster
                        yield line.pop()


@dataclass(eq=False)
class QueueConsumer:
    """One consumer.

    Attributes:
        tag: Its tag.
        queue: The consumed queue, or one partition of it.
        callback: Receives its messages.
        no_ack: Whether a message is over when it is delivered.
        partitions: The partitions that it consumes: those of the queue, those that are allocated to this
            worker, or none after its only one has gone.
    """

    tag: str
    queue: PartitionedQueue
    callback: Callable[[Any], Any]
    no_ack: bool
    partitions: tuple[Queue, ...] = ()


class PartitionConsumers:
    """The consumers of a channel. Those of one partition take turns."""

    def __init__(self) -> None:
        self._by_tag: dict[str, QueueConsumer] = {}
        #: The consumers of each partition, by the prefix of its keys.
        self._by_prefix: dict[str, deque[QueueConsumer]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_tag)

    @property
    def all(self) -> tuple[QueueConsumer, ...]:
        """All consumers."""
        return tuple(self._by_tag.values())

    def add(self, consumer: QueueConsumer, partitions: Sequence[Queue]) -> list[Queue]:
        """Add a consumer of these partitions; return those that had none before."""
        self._by_tag[consumer.tag] = consumer
        return self.assign(consumer, partitions)[0]

    def remove(self, tag: str) -> list[Queue]:
        """Remove a consumer; return the partitions that have none now."""
        consumer = self._by_tag.pop(tag, None)
        return [] if consumer is None else self.assign(consumer, ())[1]

    def assign(self, consumer: QueueConsumer, partitions: Sequence[Queue]) -> tuple[list[Queue], list[Queue]]:
        """Let a consumer consume these partitions and no other ones.

        Returns:
            The partitions that had no consumer before, and those that have none now.
        """
        before = {each.prefix: each for each in consumer.partitions}
        after = {each.prefix: each for each in partitions}
        consumer.partitions = tuple(partitions)
        begun, ended = [], []
        for prefix in after.keys() - before.keys():
            line = self._by_prefix.setdefault(prefix, deque())
            if not line:
                begun.append(after[prefix])
            line.append(consumer)
        for prefix in before.keys() - after.keys():
            line = self._by_prefix[prefix]
            line.remove(consumer)
            if not line:
                del self._by_prefix[prefix]
                ended.append(before[prefix])
        by_number = sorted(begun, key=lambda each: each.partition.keys.partition)
        return by_number, sorted(ended, key=lambda each: each.partition.keys.partition)

    def has(self, prefix: str) -> bool:
        """Return whether the partition with this prefix has a consumer."""
        return prefix in self._by_prefix

    def next_for(self, prefix: str) -> QueueConsumer:
        """Return the consumer of a partition whose turn it is."""
        line = self._by_prefix[prefix]
        line.rotate(-1)
        return line[-1]


class AllocatedPartitions:
    """Which partitions of its queues a channel consumes.

    Args:
        allocation: The partitions that this worker serves.
        maps: The maps of the queues, as the process knows them.
    """

    def __init__(self, allocation: PartitionAllocation, maps: PartitionMaps) -> None:
        self.allocation = allocation
        self._maps = maps
        self._seen = self._doubted = allocation.version

    def report(self, queue: PartitionedQueue) -> None:
        """Report a consumed queue and its number of partitions; a pinned partition is not allocated."""
        if not queue.is_pinned:
            self.allocation.consumes(queue.name, len(queue.partitions))

    @property
    def differs(self) -> bool:
        """Whether the allocation has changed since the last call of :meth:`has_changed`."""
        return self._seen != self.allocation.version

    def has_changed(self) -> bool:
        """Return whether the allocation has changed since the last call."""
        former, self._seen = self._seen, self.allocation.version
        return former != self._seen

    def of(self, queue: PartitionedQueue) -> Sequence[Queue]:
        """Return the partitions of a queue to consume."""
        served = self.allocation.served(queue.name)
        if served is None:
            return queue.partitions
        if max(served, default=0) >= len(queue.partitions) and self._doubted != self.allocation.version:
            # Other workers know more partitions. Without a lease, no heartbeat brings their number.
            self._doubted = self.allocation.version
            self._maps.doubt(queue.whole_name)
        return [each for number, each in enumerate(queue.partitions) if number in served]


class Watchdog:
    """The watchdog of one channel.

    Args:
        identity: Consumer identity of the process, which counts failed periods over reconnects.
        period_s: Seconds without a claim after which the connection is suspected; 0 means never.
    """

    def __init__(self, identity: ConsumerIdentity, period_s: float) -> None:
        self._identity = identity
        self.period_s = period_s
        #: Monotonic time until which the consumer had a reason not to claim.
        self._excused_at = identity.clock.monotonic()
        #: Monotonic time of a suspicion on which :meth:`decide` has not decided; None without one.
        self.suspected_at: float | None = None
        self._busy = False

    # -- called by the delivering thread ---------------------------------------

    def consumer_busy(self) -> None:
        """Record that a callback starts, which may take hours."""
        self._busy = True

    def consumer_idle(self) -> None:
        """Record that the callback has returned."""
        self._busy = False
        self._excused_at = self._identity.clock.monotonic()

    def decide(self, *, may_stop: bool) -> None:
        """Decide on a suspicion.

        Args:
            may_stop: Whether a worker uses the channel, which stops if a new connection did not help.

        Raises:
            redis.ConnectionError: The connection is dead.
        """
        suspected_at, self.suspected_at = self.suspected_at, None
        if suspected_at is None:
            return
        now = self._identity.clock.monotonic()
        if now - suspected_at > PROMPT_S or self._excused_at > suspected_at:
            self._excused_at = now
            return
        self._identity.watchdog_strikes += 1
        if self._identity.watchdog_strikes > 1 and may_stop:
            self._stop("A new connection did not help")
        raise redis.ConnectionError(
            f"Worker {self._identity.consumer} claimed nothing for {self.period_s:.0f} s (dq_watchdog) "
            "despite a backlog and free slots: connecting again"
        )

    # -- called by the consumer thread -----------------------------------------

    def is_suspicious(
        self, now: float, claimed_at: float, neglects: Callable[[], bool], blocks: bool
    ) -> bool:
        """Return whether to wake the delivering thread, so that it decides.

        Args:
            now: Monotonic time.
            claimed_at: Monotonic time of the last answered claim.
            neglects: Returns whether there are a backlog and free capacity.
            blocks: Whether callbacks do their work in the delivering thread.
        """
        if not self.period_s or self._busy:
            return False
        suspected_at = self.suspected_at
        if suspected_at is not None:
            # A loop that runs tasks itself decides when it turns again, however late that is.
            if not blocks and now - suspected_at >= self.period_s:
                self.suspected_at = now
                self._stop("The event loop does not turn")
            return False
        if now - max(claimed_at, self._excused_at) < self.period_s or not neglects():
            return False
        self.suspected_at = now
        return True

    def _stop(self, why: str) -> None:
        """Stop the worker, so that its supervisor starts a new one."""
        logger.critical(
            "Worker %s claimed nothing for twice %.0f s (dq_watchdog) despite a backlog and free slots. "
            "%s: the worker stops, so that its supervisor starts it again.",
            self._identity.consumer,
            self.period_s,
            why,
            extra={"event": "watchdog_stopped_worker"},
        )
        os.kill(os.getpid(), signal.SIGTERM)
