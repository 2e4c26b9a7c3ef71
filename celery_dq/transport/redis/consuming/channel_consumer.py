"""The consuming half of a channel: its consumers, its capacity, and the delivery of messages.

Claimed messages wait in the *inbox* until they are delivered: at once with an event loop, one per
``drain_events`` without. Messages in the inbox are in flight under the lease of the process.

In a worker, only delivered messages count against Celery's prefetch count. The inbox may hold more: as many
as fit the claim-ahead time. If a worker delivers nothing for some time, its inbox is released to other
consumers. In plain kombu, the inbox counts against the prefetch count, and is released after half a lease.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from celery_dq.errors import CorruptRecord
from celery_dq.protocols import Leaderships, WorkerCapacity
from celery_dq.shown import shown_name
from celery_dq.transport.in_flight.message import Message
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.consuming.claim_limits import MAX_CLAIM, CallbackPace, ClaimWindow
from celery_dq.transport.redis.consuming.consuming_channel import ConsumingChannel
from celery_dq.transport.redis.consuming.fetcher import RedisFetcher
from celery_dq.transport.redis.consuming.inbox import Inbox
from celery_dq.transport.redis.consuming.partition_consumers import (
    AllocatedPartitions,
    PartitionConsumers,
    QueueConsumer,
)
from celery_dq.transport.redis.consuming.singleton_delivery import SingletonDelivery
from celery_dq.transport.redis.consuming.subscriptions import Subscription
from celery_dq.transport.redis.consuming.watchdog import Watchdog
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.queue import PartitionedQueue, Queue

logger = logging.getLogger(__name__)

#: Seconds without a delivery, beside twice the claim-ahead time, after which a worker's inbox is overdue.
OVERDUE_S = 0.1
#: Number of partitions up to which a consumer hands all next looks over before each callback that blocks the
#: loop. So few scripts are cheap, and no message waits because a callback is long for once.
FEW_PARTITIONS = 16


class ChannelConsumer:
    """The consumers of one channel.

    Args:
        channel: The channel, for its prefetch count, worker capacity and client.
        process: Consumer identity of the process, with its in-flight messages.
        claim_ahead_s: Service time that may be claimed ahead, in seconds.
        watchdog_s: Seconds without a claim, despite a backlog, after which the connection is suspected to be
            dead; 0 means never.
    """

    def __init__(
        self, channel: ConsumingChannel, process: ConsumerIdentity, claim_ahead_s: float, watchdog_s: float
    ) -> None:
        self._channel = channel
        self._process = process
        self._claim_ahead_s = claim_ahead_s
        self.watchdog = Watchdog(process, watchdog_s)
        #: The fetcher; None if nothing was ever consumed.
        self.live_fetcher: RedisFetcher | None = None
        self._inbox = Inbox()
        self._consumers = PartitionConsumers()
        #: How long callbacks take that run in the loop.
        self.pace = CallbackPace(process.clock, claim_ahead_s)
        self._window = ClaimWindow(claim_ahead_s)
        #: Monotonic time since which the inbox holds messages.
        self._filled_at = self.pace.delivered_at
        self._capacity: WorkerCapacity | None = None
        #: Plain kombu runs its callbacks in the loop, as the solo pool does.
        self._runs_in_loop = True
        #: Restricts the consumers to the allocated partitions; None without an allocation.
        self.allocated_partitions: AllocatedPartitions | None = None
        #: Delivery of the singleton queues; None while the channel consumes none.
        self.singleton_delivery: SingletonDelivery | None = None

    # -- consumers -------------------------------------------------------------

    def start_consumer(self, consumer: QueueConsumer) -> None:
        """Start a consumer of a queue; several consumers of one partition take turns."""
        # The worker sets its capacity before it consumes. Each look-up would cost a system call.
        self._capacity = self._channel.capacity
        self._runs_in_loop = self._capacity is None or self._capacity.runs_tasks_in_loop
        if not self._consumers:
            self._process.heartbeat.add_check(self._check_consumption)
        allocation = self._channel.context.allocation
        if allocation is not None:
            if self.allocated_partitions is None:
                maps = self._process.partition_maps
                self.allocated_partitions = AllocatedPartitions(allocation, maps)
                allocation.add_listener(self._channel.poller.wake)
            self.allocated_partitions.report(consumer.queue)
        self._start_fetching(self._consumers.add(consumer, self._partitions_of(consumer.queue)))

    def _partitions_of(self, queue: PartitionedQueue) -> Sequence[Queue]:
        """Return the partitions of a queue to consume: all of them, or those allocated to this worker."""
        allocated = self.allocated_partitions
        return queue.partitions if allocated is None else allocated.of(queue)

    def _start_fetching(self, partitions: Sequence[Queue]) -> None:
        leaderships = self._channel.context.leaderships
        for each in partitions:
            if leaderships is not None and leaderships.is_singleton(each.name):
                self._singleton_delivery_of(leaderships).add(each)
            else:
                self._process.heartbeat.keep_lease(each, self._channel.heartbeat_clients)
                self.fetcher.subscribe(each, is_empty=self._channel.ahead.was_empty(each))

    def stop_consumer(self, tag: str) -> None:
        """Stop one consumer. Where it was the last one, undelivered messages are released."""
        if ended := self._consumers.remove(tag):
            self._end_fetching(ended)
        if not self._consumers:
            self._process.heartbeat.remove_check(self._check_consumption)

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
                for each in partitions:  # the heartbeat learns their number
                    self._process.heartbeat.keep_lease(each, self._channel.heartbeat_clients)
                    self._process.heartbeat.drop_lease(each, soon=False)
            self._start_fetching(begun)
            if ended:
                self._end_fetching(ended)

    def _end_fetching(self, ended: Sequence[Queue]) -> None:
        """End fetching from partitions without a consumer, and release their undelivered messages."""
        sources = []
        for each in ended:
            if self.singleton_delivery is not None and each.name in self.singleton_delivery:
                self.singleton_delivery.remove(each.name)
            elif (source := self.fetcher.unsubscribe(each.prefix)) is not None:
                sources.append(source)
        self._channel.read_all_answers()
        for message in self._inbox.take_partitions({each.prefix for each in ended}):
            self._release(message)
        self._channel.send_all_acks()
        for source in sources:
            self._process.heartbeat.drop_lease(source.queue)

    def _singleton_delivery_of(self, leaderships: Leaderships) -> SingletonDelivery:
        if self.singleton_delivery is None:
            self.singleton_delivery = SingletonDelivery(
                self._process,
                leaderships,
                fetcher=lambda: self.fetcher,
                clients=self._channel.heartbeat_clients,
                deliver=self._put_in_inbox,
                release=self._release,
                claim_ahead_s=self._claim_ahead_s,
                in_turn=self._singleton_window,
                in_loop=self._runs_in_loop,
            )
            self._process.on_fenced = lambda queue: leaderships.report_fenced(queue.name, queue.token)
            leaderships.add_listener(self._channel.poller.wake)
        return self.singleton_delivery

    @property
    def fetcher(self) -> RedisFetcher:
        """The fetcher, created at the first use."""
        if self.live_fetcher is None:
            self.live_fetcher = RedisFetcher(
                self._process,
                self._channel.async_pool,
                self,
                pipelines=self._channel.pipeline_class,
                wakeups=self._channel.wakeups_class,
            )
        return self.live_fetcher

    # -- capacity --------------------------------------------------------------

    def check(self) -> None:
        """Let the watchdog decide, and release the inbox when it is overdue; called in each turn of the loop.

        Raises:
            redis.ConnectionError: The watchdog has found that the connection is dead.
        """
        self.watchdog.decide(may_stop=self._capacity is not None)
        is_late = bool(self._inbox) and self._overdue_after() <= self._process.clock.monotonic()
        if is_late and self.overdue_at() < math.inf:
            self._release_overdue()

    def capacity(self) -> tuple[int, int]:
        """Return how many messages to claim, and how many of them fit free pool slots."""
        qos, capacity = self._channel.qos, self._capacity
        if self._channel.closed:
            return 0, 0
        if capacity is not None:
            return self._window.room(capacity, qos, self._inbox.message_count)
        if not qos.can_consume():
            return 0, 0
        allowed = qos.can_consume_max_estimate()
        want = max((self.pace.messages_ahead() if allowed is None else allowed) - len(self._inbox), 0)
        return min(want, MAX_CLAIM), min(want, MAX_CLAIM)

    def _singleton_window(self) -> int:
        """Return how many messages of a singleton queue may be delivered at a time."""
        most = 1 if self._capacity is None else self._capacity.singleton_window
        limit = self._channel.qos.prefetch_count
        return min(most, limit) if limit else most

    @property
    def acks_may_wait(self) -> bool:
        """Whether the loop turns in time for acks that wait for a claim."""
        return not self._runs_in_loop

    def can_keep_next_look(self) -> bool | None:
        """Return whether the process can keep a next look; None when it is about to block."""
        if self._blocks_loop:
            # A next look can be kept only between two messages, because a callback blocks the loop.
            return None if self.has_undelivered else False
        return True

    @property
    def _blocks_loop(self) -> bool:
        """Whether a callback may block the loop for long."""
        if not self._runs_in_loop:
            return False
        return self._consumers.partition_count <= FEW_PARTITIONS or not self.pace.is_brief

    # -- from claim to callback ------------------------------------------------

    def receive(self, source: Subscription, entry: ClaimedEntry, tag: str) -> None:
        """Make a message of a claimed entry, and put it into the inbox."""
        channel = self._channel
        try:
            message = Message(MessageRecord.unpack(entry.record), entry, tag, source.queue.name, channel)
            message.prefix = source.queue.prefix
        except CorruptRecord as exc:
            channel.dead_letter_unreadable(source.queue, entry, tag, exc)
            return
        held = channel.in_flight.get(tag)
        if held is not None:
            held.has_lock = bool(message.record.dedup)
        if source.queue.token and self.singleton_delivery is not None:
            self.singleton_delivery.add_message(message)
        else:
            self._put_in_inbox(message)

    def _put_in_inbox(self, message: Message) -> None:
        message.claimed_at = self._process.clock.monotonic()
        if not self._inbox:
            self._filled_at = message.claimed_at
        self._inbox.add(message)

    @property
    def has_undelivered(self) -> bool:
        """Whether the inbox holds a message that may be delivered now. Discards need no prefetch count."""
        return bool(self._inbox) and (
            self._window.may_deliver(self._capacity, self._channel.qos) or not self._inbox.has_messages
        )

    @property
    def has_messages(self) -> bool:
        """Whether the inbox holds a message that is not a discard."""
        return self._inbox.has_messages

    def was_busy_since(self, since: float) -> bool:
        """Return whether the last message took longer than a claim takes, and the inbox holds more.

        Args:
            since: Monotonic end of the last wait for sockets. Service time is counted from there or from the
                last delivery, the later of both.
        """
        return bool(self._inbox) and self.pace.was_long_since(since)

    def deliver_all(self) -> None:
        """Deliver all messages of the inbox. After an exception of a callback, the next ones stay there."""
        if self.has_startable and self._capacity is not None:
            self._capacity.start_ready()
        while self.has_undelivered:
            self.deliver_one()
            if self._inbox:
                continue
            self.pace.end()
            if self.singleton_delivery is not None:
                # The next messages of a singleton queue need not wait for another turn of the event loop.
                self._channel.follow_leaderships()

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

    def deliver_one(self) -> bool:
        """Deliver the next message of the inbox; return whether a consumer received it."""
        self.pace.end()
        message = self._inbox.take_next(self._process.clock.monotonic())
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
            # The lease or the term may be lost, so another worker may have the message by now.
            self._release(message)
            self.fetcher.look_again(message.prefix)
            return False
        channel.qos.append(message, tag)
        if message.discard:
            with self.fetcher.discard_pace.timed():
                return self._discard(message)
        self._window.delivered(self.pace.delivered_at - message.claimed_at)
        consumer = self._consumers.next_for(message.prefix)
        message.delivery_info["consumer_tag"] = consumer.tag
        message.started = held.delivered = capacity is None
        if consumer.no_ack:
            channel.qos.forget(tag)
            channel.in_flight.finish(tag)
        if self._blocks_loop:
            self.fetcher.handovers.send_before_blocking()
        self.watchdog.consumer_busy()
        try:
            consumer.callback(message)
        finally:
            self.watchdog.consumer_idle()
            if capacity is not None:
                # A program without a worker may use the message after its callback, until it drains again.
                self.pace.end()
        return True

    def _discard(self, message: Message) -> bool:
        capacity = self._capacity
        if capacity is not None and capacity.deliver_discard(message, message.discard):
            return True
        logger.info(
            "Message %s of queue %s was discarded without running: %s.",
            shown_name(message.message_id),
            message.queue,
            shown_name(message.discard),
            extra={"event": "message_discarded", "queue": message.queue, "reason": message.discard},
        )
        self._channel.qos.forget(message.delivery_tag)
        self._channel.in_flight.finish(message.delivery_tag)
        return False

    # -- releasing -------------------------------------------------------------

    def _release(self, message: Message) -> None:
        self._channel.qos.forget(message.delivery_tag)
        self._channel.in_flight.release(message.delivery_tag, "unstarted")

    def _release_inbox(self, queue_name: str | None = None) -> None:
        """Release the messages of the inbox, youngest first; those of one queue, or all."""
        for message in self._inbox.take_all(queue_name):
            self._release(message)

    def overdue_at(self, loop_turns: bool = True) -> float:
        """Return the monotonic time at which the inbox must be released; infinity for never."""
        if not self._inbox or (loop_turns and (self._capacity is None or self.has_undelivered)):
            return math.inf
        if self.singleton_delivery is not None and not self._releasable():
            return math.inf
        return self._overdue_after()

    def _overdue_after(self) -> float:
        """Return the monotonic time until which messages may wait in the inbox."""
        longest_s = self._process.lease_s / 2
        if self._capacity is not None:
            longest_s = min(longest_s, 2 * self._claim_ahead_s + OVERDUE_S)
        return max(self.pace.delivered_at, self._filled_at) + longest_s

    def _release_overdue(self) -> None:
        """Release the inbox, and claim nothing ahead before the next delivery."""
        self._window.close()
        self._filled_at = self._process.clock.monotonic()
        for name in self._releasable():
            self._release_inbox(name)

    def _releasable(self) -> list[str]:
        """The queues in the inbox whose messages other workers may run: no singleton queues, in this term."""
        singleton = self.singleton_delivery
        return [name for name in self._inbox.queues() if singleton is None or name not in singleton]

    def _check_consumption(self, now: float) -> None:
        """Check, in the heartbeat thread, whether this consumer still consumes."""
        if self.allocated_partitions is not None:
            self.allocated_partitions.allocation.broker_answered()
        fetcher = self.live_fetcher
        if self.overdue_at(loop_turns=False) < now:
            # A task blocks the event loop, which would send the releases.
            self._release_overdue()
            self._process.heartbeat.send_pending_acks_soon()
        if fetcher is None:
            return
        fetcher.pipeline.disown_claims(now - self._process.lease_s / 4)
        if self.watchdog.is_suspicious(now, fetcher.claimed_at, self._ignores_backlog, self._runs_in_loop):
            self._channel.poller.wake()

    def _ignores_backlog(self) -> bool:
        """Return whether a wake-up is stored for a consumed queue, although the channel has capacity.

        Singleton queues do not count: their wake-up may wait for a running message or for a retry to be due.
        """
        if not self._channel.poller.is_driven or self.capacity()[0] <= 0:
            return False
        queues = [source.queue for source in self.fetcher.subscriptions if not source.queue.token]
        return bool(self._process.heartbeat.has_unclaimed_wakeup(queues))

    # -- closing ---------------------------------------------------------------

    def close(self) -> None:
        """Release undelivered messages, and stop all consumers."""
        if self.singleton_delivery is not None and (leaderships := self._channel.context.leaderships):
            leaderships.remove_listener(self._channel.poller.wake)
        if self.allocated_partitions is not None:
            self.allocated_partitions.allocation.remove_listener(self._channel.poller.wake)
        self._release_inbox()
        for consumer in self._consumers.all:
            self.stop_consumer(consumer.tag)
        if self.live_fetcher is not None:
            self.live_fetcher.close()
