"""Calls without an answer, and claims whose answer was lost.

A connection may break between a claim and its answer. Then the broker has given messages to this process that
the process does not know, and because its lease is renewed they would stay with it. So each claim is counted
when it is sent and when it is answered. After one without an answer, the heartbeat thread compares the
messages that the broker has for this process with those that the process knows.

The consuming thread and the heartbeat thread call this without a lock. A message is released only when two
comparisons, a heartbeat apart, agree.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import redis

from celery_dq.clock import Clock
from celery_dq.transport.in_flight.pending_acks import MAX_ACKS_PER_CALL, delivery_tag
from celery_dq.transport.partition_replies import DeliveryTag
from celery_dq.transport.redis.store.queue import Queue

logger = logging.getLogger(__name__)

#: Heartbeats with a comparison after a lost answer: the claim itself may arrive late.
LOOKS = 3
#: Answered claims that are remembered per partition.
REMEMBERED = 4096
#: The first bytes of an entry of an in-flight hash.
CLAIM_NUMBER = struct.Struct(">d")
#: Approximate number of messages per scan.
FIELDS_PER_SCAN = 200


class InDoubtClaims:
    """The calls of one process without an answer, and the claims whose answer was lost.

    Args:
        clock: measures by its monotonic time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Several threads count by the length: appending and popping are atomic.
        self._claims: dict[str, deque[None]] = {}
        #: Times at which the calls with acks were sent, oldest first, by partition.
        self._acks: dict[str, deque[float]] = {}
        self._answered: dict[str, dict[str, None]] = {}
        self._looks_left: dict[str, int] = {}
        self._unknown: dict[str, set[tuple[str, str]]] = {}
        self._ack_waiters: dict[str, Callable[[], None]] = {}

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

    def count_acks_under_way(self, partition: str, change: int) -> None:
        """Count a call with acks that is sent (*change* +1), or answered or given up (-1)."""
        under_way = self._acks.setdefault(partition, deque())
        if change > 0:
            under_way.append(self._clock.monotonic())
        else:
            under_way.popleft()
            self._end_wait(partition, under_way)

    @contextmanager
    def taking_acks(self, partition: str) -> Iterator[None]:
        """Count a call with acks while the calling thread takes acks, whether or not it sends them.

        It counts before it looks for the calls of other threads: of two threads, one or both see the other.
        Acks are counted before they are taken, so that they are never taken for confirmed.
        """
        under_way = self._acks.setdefault(partition, deque())
        under_way.append(self._clock.monotonic())
        try:
            yield
        finally:
            under_way.pop()  # the latest: the time of an earlier call without an answer stays
            self._end_wait(partition, under_way)

    def _end_wait(self, partition: str, under_way: deque[float]) -> None:
        if self._ack_waiters and not under_way:
            answered = self._ack_waiters.pop(partition, None)
            if answered is not None:
                answered()

    def acks_under_way(self, partition: str) -> int:
        """Return how many calls with acks have no answer yet, or are about to be sent."""
        return len(self._acks.get(partition, ()))

    def awaits_others(self, partition: str, within_s: float) -> bool:
        """Return whether a call before the latest was sent less than *within_s* seconds ago."""
        sent_at = self._acks[partition]
        return len(sent_at) > 1 and self._clock.monotonic() - sent_at[0] < within_s

    def is_unsettled(self, partition: str) -> bool:
        """Return whether a call has no answer yet, or a claim was lost and is not cleared up."""
        return self.has_call_under_way(partition) or partition in self._looks_left

    def has_call_under_way(self, partition: str) -> bool:
        """Return whether a call has no answer yet."""
        return bool(self._claims.get(partition) or self._acks.get(partition))

    def wait_for_acks(self, partition: str, answered: Callable[[], None]) -> bool:
        """Return whether a call with acks has no answer yet, or is about to be sent.

        Args:
            partition: :attr:`Queue.key` of the queue.
            answered: called once after the last of these answers, if there is one.
        """
        # First, because another thread may read the answer now.
        self._ack_waiters[partition] = answered
        if self._acks.get(partition):
            return True
        self._ack_waiters.pop(partition, None)
        return False

    # -- the heartbeat thread ----------------------------------------------------

    def needs_comparison(self, partition: str) -> bool:
        """Return whether the heartbeat thread must compare."""
        return partition in self._looks_left

    def find_unknown(
        self, partition: str, held: Iterable[tuple[str, str]], is_ours: Callable[[str], object]
    ) -> list[tuple[str, str]]:
        """Find messages that the broker has for this process and that the process does not know.

        Args:
            partition: :attr:`Queue.key` of the queue.
            held: (claim number, message id) of the messages that the broker has, read now.
            is_ours: returns whether the process has a message with this delivery tag.

        Returns:
            (claim number, message id) of those that the comparison before has found, too.
        """
        known = self._answered.get(partition, {})
        strangers = {
            (claim, message_id)
            for claim, message_id in held
            if claim not in known and not is_ours(delivery_tag(partition, claim, message_id))
        }
        if self._claims.get(partition):
            return []  # they may be in the answer that is still to come
        seen_before = self._unknown.pop(partition, set())
        confirmed = strangers & seen_before
        if strangers - confirmed:
            self._unknown[partition] = strangers - confirmed
        else:
            self._looks_left[partition] -= 1
            if not self._looks_left[partition]:
                del self._looks_left[partition]
        return sorted(confirmed)

    def forget_partition(self, partition: str) -> None:
        """Remove a partition that is not consumed any more and has no in-flight message."""
        self._answered.pop(partition, None)
        self._looks_left.pop(partition, None)
        self._unknown.pop(partition, None)
        self._ack_waiters.pop(partition, None)

    def release_unknown(
        self, queue: Queue, consumer: str, client: redis.Redis, is_ours: Callable[[str], object]
    ) -> None:
        """Release the messages that the broker has for this process, and that the process does not know.

        Args:
            queue: the queue.
            consumer: the name of the process in the leases.
            client: a redis client.
            is_ours: as in :meth:`find_unknown`.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        name = queue.consumer(consumer)
        fields = client.hscan_iter(queue.partition.keys.held(name), count=FIELDS_PER_SCAN)
        held = [(f"{CLAIM_NUMBER.unpack_from(value)[0]:.0f}", key.decode()) for key, value in fields]
        strangers = [DeliveryTag(*each) for each in self.find_unknown(queue.key, held, is_ours)]
        for start in range(0, len(strangers), MAX_ACKS_PER_CALL):
            chunk = strangers[start : start + MAX_ACKS_PER_CALL]
            queue.partition.release(name, chunk, mode="unstarted").run(client)
        if strangers:
            logger.info(
                "Worker %s released %d messages of queue %s: the answer to their claim was lost.",
                consumer,
                len(strangers),
                queue.name,
                extra={"event": "unanswered_claim_released", "queue": queue.name},
            )
