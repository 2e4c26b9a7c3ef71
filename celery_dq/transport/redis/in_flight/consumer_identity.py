"""One process as a consumer of one broker, with one lease per partition.

The lease belongs to the process, not to a channel or a connection. So a broken connection, or an event loop
that a long task blocks, costs no message. The consumer thread renews it.
"""

from __future__ import annotations

import logging
import math
import socket
import uuid
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import redis

from celery_dq.clock import Clock, SystemClock
from celery_dq.per_process import OwnerProcess
from celery_dq.scripts.loader import ScriptSet
from celery_dq.shown import shell_word, shown_logger
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.in_flight.pending_acks import InFlightMessage
from celery_dq.transport.partition_replies import ClaimedEntry, ClaimReply, HeartbeatReply
from celery_dq.transport.redis.in_flight import data_loss
from celery_dq.transport.redis.in_flight.in_doubt import InDoubtClaims
from celery_dq.transport.redis.store.partition_map import PartitionMap, PartitionMaps
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.script_calls import load_scripts
from celery_dq.transport.redis.store.server_errors import RefusalLog
from celery_dq.transport.redis.store.slot_map import NodeUnreachable, SlotMap

logger = shown_logger(__name__)


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
        self.data_loss = data_loss.DataLoss(lease_s)
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
            claimed: the answer.
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
        homes = renewal.homes
        if homes and PartitionMap.parse(homes) != self.partition_maps.get(queue.name):
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
            data_loss.report(queue.partition_name, *lost)
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
