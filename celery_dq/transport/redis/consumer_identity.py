"""One process as a consumer of one broker, with one lease per partition.

The lease belongs to the process, not to a channel or a connection. So a broken connection, or an event loop
that a long task blocks, costs no message. The consumer thread renews it.

The identity notices what Redis loses. The claims of a partition are numbered: while Redis keeps its data, the
number never goes back, and no lease ends before its time (:class:`DataLoss`).

It also knows the claims without an answer (:class:`InDoubtClaims`). A connection may break between a claim
and its answer, and Redis may lose acks that it had confirmed: in a failover to a replica that was behind, or
in a crash. Then the broker has messages for this process that the process does not have, and because its
lease is renewed they would stay with it. So the consumer thread compares the two, between its trips, when no
ack is under way: after a claim without an answer, after each reconnect, when Redis shows that it has lost
data, and once in some leases in any case. A message is released only when two comparisons, a round of
renewals apart, agree. The threads that ``basic_get`` runs in note their claims, too, without a lock.
"""

from __future__ import annotations

import logging
import math
import socket
import struct
import uuid
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import redis

from celery_dq.clock import Clock, SystemClock
from celery_dq.per_process import OwnerProcess
from celery_dq.scripts.loader import ScriptSet
from celery_dq.shown import shell_word, shown_ids, shown_logger
from celery_dq.transport.in_flight import MAX_ACKS_PER_CALL, InFlightMessage, InFlightMessages, delivery_tag
from celery_dq.transport.partition_replies import (
    ClaimedEntry,
    ClaimReply,
    DeliveryTag,
    HeartbeatReply,
    ReleaseMode,
)
from celery_dq.transport.redis.store.partition import Queue
from celery_dq.transport.redis.store.partition_map import PartitionMaps
from celery_dq.transport.redis.store.script_calls import load_scripts
from celery_dq.transport.redis.store.server_errors import RefusalLog
from celery_dq.transport.redis.store.slot_map import NodeUnreachable, SlotMap

logger = shown_logger(__name__)

#: Rounds of renewals with a comparison after a lost answer: the claim itself may arrive late.
LOOKS = 3
#: Leases after which a comparison is made in any case.
COMPARE_EVERY_LEASES = 3
#: Answered claims that are remembered per partition.
REMEMBERED = 4096
#: The first bytes of an entry of an in-flight hash.
CLAIM_NUMBER = struct.Struct(">d")
#: Approximate number of messages per scan.
FIELDS_PER_SCAN = 200


class _LastAnswer(NamedTuple):
    """The last answer about a partition: the number of its last claim, and two monotonic times."""

    number: int
    sent_at: float
    read_at: float


class ClaimTimes:
    """A histogram of the times from sending a claim of a queue to reading its answer, for the metrics.

    One thread adds, others read.

    Attributes:
        bounds_s: Upper bounds of the buckets, in seconds.
        buckets: Number of claims in each bucket.
        sum_s: Sum of the times, in seconds.
    """

    bounds_s: ClassVar[tuple[float, ...]] = (
        *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0),
        math.inf,
    )

    def __init__(self) -> None:
        self.buckets = [0] * len(self.bounds_s)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one claim."""
        self.buckets[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds


class DataLoss:
    """The claim numbers that one process has seen.

    Args:
        lease_s: length of a lease in seconds.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._known: dict[str, _LastAnswer] = {}

    def check(
        self, partition: str, number: int, *, lease_lost: bool, sent_at: float, now: float
    ) -> tuple[int, int] | None:
        """Compare an answer with earlier ones.

        Args:
            partition: :attr:`Queue.key` of the queue.
            number: number of the last claim in the answer.
            lease_lost: whether the answer reports that this process had no lease.
            sent_at: monotonic time at which this request was sent.
            now: the monotonic time.

        Returns:
            Old and new claim number when Redis has lost data, else None.
        """
        known = self._known.get(partition)
        if known is not None and sent_at < known.read_at:
            return None  # this request may be older than the one whose answer came first
        self._known[partition] = _LastAnswer(number, sent_at, now)
        if known is None:
            return None
        # Without claims no number can go back, but a lease that ended before its time shows the loss.
        ended_early = lease_lost and now - known.sent_at < self._lease_s
        if number < known.number or (known.number == number == 0 and ended_early):
            return known.number, number
        return None

    def forget(self, partition: str) -> None:
        """Remove a partition whose lease this process has given back."""
        self._known.pop(partition, None)


def _report_loss(queue: str, known: int, number: int) -> None:
    """Log the loss of data when the last claim of *queue* was number *known* and is *number* now."""
    if number:
        logger.error(
            "Redis has lost its latest writes to queue %s: its last claim was number %d and is number %d "
            "now. Messages published last may be gone, and messages that were finished may run again. Redis "
            "is a replica that was behind when it took over, or was restored from an older copy: see "
            "min-replicas-to-write and appendfsync.",
            queue,
            known,
            number,
            extra={"event": "writes_lost", "queue": queue},
        )
    else:
        logger.error(
            "Redis has lost all data of queue %s, or all since its first claim: waiting and delayed "
            "messages, dead letters, pauses and quotas set by command may be gone. Tasks that workers have "
            "go on. Publish the others again from their source. Redis was flushed, or restarted without an "
            "append-only file: set appendonly yes; or a replica took over that was behind.",
            queue,
            extra={"event": "data_lost", "queue": queue},
        )


class InDoubtClaims:
    """The claims of one process without an answer, and those whose answer was lost.

    Args:
        clock: measures by its monotonic time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Several threads count by the length: appending and popping are atomic.
        self._claims: dict[str, deque[None]] = {}
        self._answered: dict[str, dict[str, None]] = {}
        self._looks_left: dict[str, int] = {}
        self._unknown: dict[str, set[str]] = {}
        #: Monotonic time of the next comparison.
        self._due_at: dict[str, float] = {}
        #: Delivery tags that were reported as missing in the broker.
        self._missing: dict[str, set[str]] = {}

    # -- calls without an answer -------------------------------------------------

    def claim_sent(self, partition: str) -> None:
        """Note that a claim is about to be sent."""
        self._claims.setdefault(partition, deque()).append(None)

    def claim_answered(self, partition: str, claims: Iterable[str]) -> None:
        """Note the answer to a claim, whose messages are among the in-flight messages.

        Args:
            partition: :attr:`Queue.key` of the queue.
            claims: the claim numbers of the messages.
        """
        self._claims[partition].pop()
        known = self._answered.setdefault(partition, {})
        for claim in claims:
            known[claim] = None
        while len(known) > REMEMBERED:
            del known[next(iter(known))]

    def claim_unanswered(self, partition: str) -> None:
        """Note that the answer to a claim will not come, or will not be used."""
        self._claims[partition].pop()
        self._looks_left[partition] = LOOKS

    def is_unsettled(self, partition: str) -> bool:
        """Return whether a claim has no answer yet, or its answer was lost and that is not cleared up."""
        return self.has_claim_under_way(partition) or partition in self._looks_left

    def has_claim_under_way(self, partition: str) -> bool:
        """Return whether a claim has no answer yet."""
        return bool(self._claims.get(partition))

    # -- the comparison ----------------------------------------------------------

    def needs_comparison(self, partition: str) -> bool:
        """Return whether the answer to a claim was lost, and its messages are not cleared up."""
        return partition in self._looks_left

    def doubt(self, partition: str) -> None:
        """Let the next round of renewals compare: the connection was another one, or Redis has lost data."""
        self._due_at[partition] = -math.inf

    def is_due(self, partition: str, lease_s: float) -> bool:
        """Return whether a comparison must be made now."""
        if partition in self._looks_left or partition in self._unknown:
            return True
        now = self._clock.monotonic()
        return now >= self._due_at.setdefault(partition, now + COMPARE_EVERY_LEASES * lease_s)

    def find_unknown(
        self, partition: str, held: Collection[str], known: Callable[[], list[InFlightMessage] | None]
    ) -> list[str]:
        """Find messages that the broker has for this process and that the process does not have.

        Args:
            partition: :attr:`Queue.key` of the queue.
            held: delivery tags of the messages that the broker has.
            known: returns the messages that the process has, or whose end is pending; None when it cannot
                tell now.

        Returns:
            The tags of those that the comparison before has found, too.
        """
        if self._claims.get(partition):
            return []  # they may be in the answer that is still to come
        # Read after that: the messages of an answered claim are in flight before it counts as answered.
        own = known() if held else []
        if own is None:
            return []
        strangers = {*held} - {message.tag for message in own}
        confirmed = strangers & self._unknown.pop(partition, set())
        if strangers - confirmed:
            self._unknown[partition] = strangers - confirmed
        elif partition in self._looks_left:
            self._looks_left[partition] -= 1
            if not self._looks_left[partition]:
                del self._looks_left[partition]
        self._due_at.pop(partition, None)
        return sorted(confirmed)

    def forget_partition(self, partition: str) -> None:
        """Remove a partition that is not consumed any more and has no in-flight message."""
        self._answered.pop(partition, None)
        self._looks_left.pop(partition, None)
        self._unknown.pop(partition, None)
        self._due_at.pop(partition, None)
        self._missing.pop(partition, None)

    def compare(
        self,
        queue: Queue,
        consumer: str,
        client: redis.Redis,
        in_flight: InFlightMessages,
        had: Iterable[str],
        count: int,
    ) -> None:
        """Compare what the broker has for this process with what the process has, and log the differences.

        A message that only the broker has is released. One that only the process has goes on.

        Args:
            queue: the queue.
            consumer: the name of the process in the leases.
            client: a redis client.
            in_flight: the messages of the process.
            had: delivery tags of those of the queue, read before the broker was asked.
            count: number of messages that the broker has for the process.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        held: dict[str, DeliveryTag] = {}
        if count:
            key = queue.partition.keys.held(queue.consumer(consumer))
            for field, value in client.hscan_iter(key, count=FIELDS_PER_SCAN):
                tag = DeliveryTag(f"{CLAIM_NUMBER.unpack_from(value)[0]:.0f}", field.decode())
                held[delivery_tag(queue.key, *tag)] = tag
        self._release_unknown(queue, consumer, client, held, in_flight)
        self._report_missing(queue, consumer, {tag for tag in had if tag not in held and tag in in_flight})

    def _release_unknown(
        self,
        queue: Queue,
        consumer: str,
        client: redis.Redis,
        held: Mapping[str, DeliveryTag],
        in_flight: InFlightMessages,
    ) -> None:
        answered, is_claim_lost = self._answered.get(queue.key, {}), self.needs_comparison(queue.key)
        lost_claims: list[DeliveryTag] = []
        lost_acks: list[DeliveryTag] = []
        for tag in self.find_unknown(queue.key, held, lambda: in_flight.known_messages(queue.key)):
            may_be_claim = is_claim_lost and held[tag].claim not in answered
            (lost_claims if may_be_claim else lost_acks).append(held[tag])
        # The task of a lost ack may have run: the next delivery is a second one, and its permit is spent.
        for mode, tags in (("unstarted", lost_claims), ("requeue", lost_acks)):
            for start in range(0, len(tags), MAX_ACKS_PER_CALL):
                chunk = tags[start : start + MAX_ACKS_PER_CALL]
                name = queue.consumer(consumer)
                queue.partition.release(name, chunk, mode=cast("ReleaseMode", mode)).run(client)
        if lost_claims:
            logger.info(
                "Worker %s released %d messages of queue %s: the answer to their claim was lost.",
                consumer,
                len(lost_claims),
                queue.name,
                extra={"event": "unanswered_claim_released", "queue": queue.name},
            )
        if lost_acks:
            logger.warning(
                "Redis has lost acknowledgements of worker %s on queue %s: %d messages that had ended go "
                "back to the queue and run again, except those that were acknowledged early: %s. Redis is a "
                "replica that was behind when it took over, or was restored from an older copy: see "
                "min-replicas-to-write and appendfsync.",
                consumer,
                queue.partition_name,
                len(lost_acks),
                shown_ids([each.id for each in lost_acks]),
                extra={"event": "lost_acks_released", "queue": queue.name},
            )

    def _report_missing(self, queue: Queue, consumer: str, missing: set[str]) -> None:
        new = sorted(missing - self._missing.get(queue.key, set()))
        self._missing[queue.key] = missing
        if new:
            logger.warning(
                "Worker %s has %d messages of queue %s that Redis does not have for it any more: %s. Their "
                "tasks go on. Redis has lost their claims, so that they may run a second time, or other "
                "workers got them when the lease was lost.",
                consumer,
                len(new),
                queue.partition_name,
                shown_ids([tag.removeprefix(f"{queue.key}/").partition("/")[2] for tag in new]),
                extra={"event": "claims_lost", "queue": queue.name},
            )


class ServerClock:
    """The wall clock of one Redis server, extrapolated by the monotonic clock of this machine.

    It is behind the server's by the way of the answer, and never ahead of it.

    Args:
        clock: the clock of this machine.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Server time minus monotonic time, in seconds; None until the server was asked.
        self._offset: float | None = None

    def ask(self, client: redis.Redis) -> None:
        """Ask the server for its time.

        Raises:
            redis.RedisError: No answer.
        """
        seconds, microseconds = client.time()
        # The server has read its clock before this moment, so that no time of it is taken for over too early.
        self._offset = seconds + microseconds / 1e6 - self._clock.monotonic()

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC by the server's clock; by this machine's before an answer."""
        return self._clock.wall() if self._offset is None else self._clock.monotonic() + self._offset


class ConsumerIdentity:
    """The state that a process keeps for one broker across reconnects.

    Args:
        lease_s: length of the lease in seconds: the messages of a dead process are released after it.
        clock: another clock, for tests.
        slots: the map of the Redis Cluster; None on one server.
    """

    def __init__(self, lease_s: float, clock: Clock | None = None, slots: SlotMap | None = None) -> None:
        self.owner = OwnerProcess()
        self._unique = f"{self.owner.pid}:{uuid.uuid4().hex[:12]}"
        #: The process's name in the leases, unique; ``celery dq explain`` shows it.
        self.consumer = f"{socket.gethostname()}:{self._unique}"
        #: Logs the commands that Redis refuses.
        self.refusals = RefusalLog(lambda: self.consumer)
        self.clock: Clock = clock or SystemClock()
        self.server_clock = ServerClock(self.clock)
        self.lease_s = lease_s
        self.lease_ms = int(lease_s * 1000)
        self.in_flight = InFlightMessages(self.clock, lease_s, acks_wait=True)
        self.in_doubt = InDoubtClaims(self.clock)
        #: Returns the tags of deliveries that run or are about to; set by the worker.
        self.running_tags: Callable[[], frozenset[str]] = frozenset
        #: The :class:`ConsumerThreads` of the process, which are made with it.
        self.threads: Any = None
        #: The Lua scripts, read once per process.
        self.scripts: ScriptSet = load_scripts(on_cluster=slots is not None)
        self.slots = slots
        #: How often in a row the watchdog found a backlog and no claim.
        self.watchdog_strikes = 0
        self.data_loss = DataLoss(lease_s)
        #: Called with a queue whose leader is another process.
        self.on_fenced: Callable[[Queue], None] | None = None
        self._fenced: set[str] = set()
        #: Servers that have passed the checks, so that each is checked once.
        self.checked_servers: set[str] = set()
        #: The partitions of each queue, as the broker has them.
        self.partition_maps = PartitionMaps()
        #: How long the claims of each queue took.
        self.claim_times: defaultdict[str, ClaimTimes] = defaultdict(ClaimTimes)

    def name_after(self, worker: str) -> None:
        """Consume under the name of a Celery worker, unless it is "".

        The process may have published before the worker knew its name. It had no lease then.
        """
        if worker:
            self.consumer = f"{worker}:{self._unique}"

    def may_have_claimed(self, queue: Queue) -> bool:
        """Return whether this process may have claimed from *queue* before."""
        return self.in_flight.renewed_at(queue.key) is not None or self.in_doubt.is_unsettled(queue.key)

    def claimed(
        self, queue: Queue, claimed: ClaimReply, sent_at: float
    ) -> Iterator[tuple[ClaimedEntry, InFlightMessage | None]]:
        """Record the answer to a claim. Every claimed message enters the process here.

        Args:
            queue: the claimed queue.
            claimed: the answer; for a fenced one, :meth:`record_fenced` is called instead.
            sent_at: monotonic time at which the claim was sent.

        Yields:
            Each claimed entry with its in-flight message, or with None when the claim is void.
        """
        in_flight, key = self.in_flight, queue.key
        if claimed.lost_up_to is not None:
            self.record_lost_lease(queue, claimed.lost_up_to, sent_at)
        in_flight.record_renewal(key, sent_at)
        in_flight.stale += claimed.stale
        void = 0
        for entry in claimed.entries:
            held = in_flight.add(key, entry.id, entry.claim)
            void += held is None
            yield entry, held
        if void:
            logger.warning(
                "Worker %s read the answer to a claim of queue %s after its lease was lost; the %d messages "
                "of that claim are not started here. Another worker gets them.",
                self.consumer,
                queue.partition_name,
                void,
                extra={"event": "void_claim", "queue": queue.name},
            )

    def claim_one(self, client: redis.Redis, queue: Queue) -> list[tuple[ClaimedEntry, str]]:
        """Claim one message now, as delivered to the caller.

        Args:
            client: a client that waits for the answer.
            queue: the queue.

        Returns:
            Pairs of message and delivery tag: at most one message, and discards. Empty if none is eligible.

        Raises:
            redis.RedisError: Redis did not answer. The consumer thread releases messages of such a claim.
        """
        key = queue.key
        while True:
            sent_at = self.clock.monotonic()
            self.in_doubt.claim_sent(key)
            try:
                claimed = queue.partition.claim(
                    queue.consumer(self.consumer),
                    lease_ms=self.lease_ms,
                    want=1,
                    hold=None,
                    max_deliveries=queue.max_deliveries,
                ).run(client)
            except BaseException:
                self.in_doubt.claim_unanswered(key)
                raise
            if claimed.fenced:
                self.in_doubt.claim_answered(key, ())
                self.record_fenced(queue, claimed.lost_up_to or 0)
                return []
            taken = []
            for entry, held in self.claimed(queue, claimed, sent_at):
                if held is not None:
                    held.delivered = True
                    taken.append((entry, held.tag))
            self.in_doubt.claim_answered(key, (entry.claim for entry in claimed.entries))
            if taken or not claimed.entries:
                return taken

    def renewed(self, queue: Queue, renewal: HeartbeatReply, sent_at: float) -> None:
        """Record the answer to a renewal that was sent at monotonic *sent_at*."""
        if renewal.fenced:
            self.record_fenced(queue, renewal.claim)
            return
        if renewal.alive:
            self._check_data(queue, renewal.claim, False, sent_at)
        else:
            self.record_lost_lease(queue, renewal.claim, sent_at)
        self.in_flight.record_renewal(queue.key, sent_at)
        known = self.partition_maps.get(queue.name)
        # As texts: another program may have written one that is not a map.
        if renewal.homes and (known is None or renewal.homes != known.text):
            self.partition_maps.doubt(queue.name)
            self.in_flight.notify_listeners()

    def not_renewed(self, queue: Queue, error: Exception) -> None:
        """Note a renewal that failed with *error*.

        The lost answer may have been that the lease had expired, and the next renewal would not say it again.
        So the messages that have not begun are released then. The broker ignores that for a message that
        another worker has.
        """
        key, since_s = queue.key, self.in_flight.seconds_since_renewal(queue.key, self.clock.monotonic())
        refused = isinstance(error, redis.ResponseError) and not isinstance(error, NodeUnreachable)
        if refused or since_s < self.lease_s:
            return
        running = self.running_tags()
        for held in self.in_flight.messages_of(key):
            if held.tag not in running and not (held.settled or held.delivered):
                self.in_flight.release(held.tag, "unstarted")

    def _check_data(self, queue: Queue, last_claim: int, lease_lost: bool, sent_at: float) -> bool:
        now = self.clock.monotonic()
        lost = self.data_loss.check(queue.key, last_claim, lease_lost=lease_lost, sent_at=sent_at, now=now)
        if lost is not None:
            _report_loss(queue.partition_name, *lost)
            self.in_doubt.doubt(queue.key)
            self.in_flight.renumbered(queue.key)
        return lost is not None

    def record_lost_lease(self, queue: Queue, last_claim: int, sent_at: float) -> None:
        """Drop the messages that have not begun, because a claim or renewal found that the lease was lost.

        Args:
            queue: the queue.
            last_claim: number of the last claim before the loss was found; messages of later claims stay.
            sent_at: monotonic time at which the claim or renewal was sent.
        """
        partition = queue.key
        had = self.in_flight.count_of(partition, last_claim)
        forgot = self._check_data(queue, last_claim, True, sent_at)
        lost = self.in_flight.lose_lease(partition, self.running_tags(), last_claim, sent_at)
        if had and not forgot:
            logger.warning(
                "The lease of worker %s on queue %s had expired: other workers may have its messages. %d "
                "messages that had not begun are dropped here; running tasks go on. Redis was away for "
                "longer than dq_lease (%g s), or this machine stood still: a longer dq_lease, or a less "
                "loaded machine, avoids this.",
                self.consumer,
                queue.partition_name,
                lost,
                self.lease_s,
                extra={"event": "lease_lost", "queue": queue.name},
            )

    def record_fenced(self, queue: Queue, last_claim: int) -> None:
        """Drop the messages that have not begun, because *queue* has a later leader.

        Args:
            queue: the queue.
            last_claim: number of the last claim before the broker's answer.
        """
        lost = self.in_flight.lose_lease(queue.key, self.running_tags(), last_claim)
        known = queue.key in self._fenced
        self._fenced.add(queue.key)
        if not queue.token:
            logger.log(
                logging.DEBUG if known else logging.WARNING,
                "Worker %s consumes queue %s without an election, but it is a singleton queue: this worker "
                "gets no messages of it. Name the queue in dq_singleton_queues of this worker, too. Or, if "
                "no worker has it there any more: celery dq leaders %s --forget",
                self.consumer,
                queue.partition_name,
                shell_word(queue.name),
                extra={"event": "singleton_queue_without_election", "queue": queue.name},
            )
        else:
            # After an ordinary end of a term there is no message to drop.
            logger.log(
                logging.WARNING if lost else logging.DEBUG,
                "Worker %s does not lead queue %s any more (token %d): %d messages that had not begun are "
                "dropped here, and the new leader gets them.",
                self.consumer,
                queue.partition_name,
                queue.token,
                lost,
                extra={"event": "fenced_out", "queue": queue.name},
            )
        if self.on_fenced is not None:
            self.on_fenced(queue)
