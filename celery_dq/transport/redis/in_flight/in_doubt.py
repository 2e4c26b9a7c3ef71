"""Claims without an answer, and the comparison of what the broker and this process have in flight.

A connection may break between a claim and its answer, and Redis may lose acks that it had confirmed: in a
failover to a replica that was behind, or in a crash. Then the broker has messages for this process that the
process does not have, and because its lease is renewed they would stay with it. So the consumer thread
compares the two, between its trips, when no ack is under way: after a claim without an answer, after each
reconnect, when Redis shows that it has lost data, and once in some leases in any case. A message is released
only when two comparisons, a round of renewals apart, agree.

The threads that ``basic_get`` runs in note their claims, too, without a lock.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import cast

import redis

from celery_dq.clock import Clock
from celery_dq.shown import shown_ids, shown_logger
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.in_flight.pending_acks import MAX_ACKS_PER_CALL, InFlightMessage, delivery_tag
from celery_dq.transport.partition_replies import DeliveryTag, ReleaseMode
from celery_dq.transport.redis.store.queue import Queue

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
