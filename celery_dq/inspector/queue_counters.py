"""The counters of a queue, from the state of its partition."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from celery_dq.inspector.redis_values import Client, number
from celery_dq.transport.redis.store.partition import TENANTS_PER_LOOK, Partition
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds

#: Upper bounds of the buckets of waiting times, in seconds. ``include/waiting_times.lua`` has the same.
WAIT_BOUNDS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0, 3600.0, math.inf)
#: The places of tenants with a backlog, next in turn first.
PLACES = ("turn", "resource_sets", "throttled", "at_concurrency", "paused")
#: Tenants with a backlog of which :func:`oldest_waiting_s` looks at the oldest message.
MOST_TENANTS = 4_000
#: Tenants that the looks of one round trip read. Redis serves no other client meanwhile.
TENANTS_PER_TRIP = 1_000

_BUCKET_BYTES = 5
_WAITS_BYTES = 8 + _BUCKET_BYTES * len(WAIT_BOUNDS_S)


@dataclass(frozen=True)
class Counter:
    """A counter of a queue. Scripts, snapshots, metrics and the dashboard have the rows of :data:`COUNTERS`.

    Attributes:
        name: Attribute of :class:`QueueCounters`, and field of the hash ``state``.
        metric: Name of its metric, between ``celery_dq_`` and ``_total``.
        meaning: One sentence, the help text in Prometheus.
        title: Its name on the dashboard; "" where it is not shown.
        is_stored: Whether the scripts count it; else it follows from the others.
    """

    name: str
    metric: str
    meaning: str
    title: str = ""
    is_stored: bool = True


COUNTERS = (
    Counter(
        "pushed",
        "messages_published",
        "Messages that were stored; moved ones count in both queues.",
        "published",
    ),
    Counter("claimed", "messages_claimed", "Deliveries of messages to workers.", "claimed", is_stored=False),
    Counter("settled", "messages_settled", "Messages whose early ack reached the broker before their end."),
    Counter(
        "finished",
        "messages_finished",
        "Messages that have left their worker for good.",
        "finished",
        is_stored=False,
    ),
    Counter(
        "released",
        "messages_released",
        "Messages that a worker has given back unstarted or requeued.",
        "released",
    ),
    Counter(
        "reaped",
        "messages_reaped",
        "Messages that were taken back from a lost worker.",
        "reaped from lost workers",
    ),
    Counter(
        "leases_lost",
        "leases_lost",
        "Leases of workers that expired: the workers were killed, cut off or stood still.",
        "leases that expired",
    ),
    Counter(
        "stale_acks",
        "stale_acks",
        "Acks and releases that changed nothing, because the worker had lost the message.",
        "stale acks",
    ),
    Counter(
        "discarded",
        "messages_discarded",
        "Messages that will not run: cancelled, expired, dead or covered by a call.",
    ),
    Counter("cancelled", "messages_cancelled", "Discards that were cancelled.", "cancelled"),
    Counter("expired", "messages_expired", "Discards that expired.", "expired"),
    Counter("discards_finished", "messages_discards_finished", "Discards whose end a worker has recorded."),
    Counter("dead_lettered", "messages_dead_lettered", "Dead letters that were stored.", "dead-lettered"),
    Counter("replayed", "messages_replayed", "Dead letters that were sent again.", "replayed"),
    Counter(
        "full",
        "messages_refused_full",
        "Attempts to publish a message whose tenant had as many waiting as it may.",
        "refused by full tenants",
    ),
    Counter(
        "overflowed",
        "messages_overflowed",
        "Messages that newer ones have pushed out of a full backlog.",
        "pushed out by newer ones",
    ),
    Counter(
        "dropped",
        "messages_dropped",
        "Messages that were deleted before their end, for example by a purge.",
        "dropped",
    ),
)
_STORED = tuple(each.name for each in COUNTERS if each.is_stored)
#: The fields of the hash ``state`` that :meth:`QueueCounters.read` reads.
COUNTER_FIELDS = (*_STORED, "discards_claimed", "waits_alone", "waits_in_line", "held")


@dataclass(frozen=True)
class WaitingTimes:
    """How long claimed messages have waited since they were stored or due.

    A released message keeps its first time, and counts at each claim; so does a message that is moved to
    another queue. Time at a limit of the tenant, in a pause or behind a dedup lock is part of the wait. When
    ``dq_priority_aging`` changes, the times of waiting messages with a priority above 0 are not right.

    Attributes:
        count: Number of claimed messages.
        sum_s: Sum of their waiting times, in seconds.
        buckets: Number of messages in each bucket. The upper bounds are 1, 5, 25, 100 and 500 ms, 2 s, 10 s,
            1 min, 10 min and 1 h; the last bucket has none.
    """

    bounds_s: ClassVar[tuple[float, ...]] = WAIT_BOUNDS_S

    count: int = 0
    sum_s: float = 0.0
    buckets: tuple[int, ...] = (0,) * len(WAIT_BOUNDS_S)

    def __add__(self, other: WaitingTimes) -> WaitingTimes:
        """Return the times of both, as of two partitions."""
        buckets = tuple(map(sum, zip(self.buckets, other.buckets, strict=True)))
        return WaitingTimes(self.count + other.count, self.sum_s + other.sum_s, buckets)

    @classmethod
    def unpack(cls, packed: bytes | None) -> WaitingTimes:
        """Return the times of a field of the state, as ``include/waiting_times.lua`` packs them."""
        if packed is None or len(packed) != _WAITS_BYTES:
            return cls()
        (sum_us,) = struct.unpack_from(">d", packed)
        starts = range(8, len(packed), _BUCKET_BYTES)
        buckets = tuple(int.from_bytes(packed[start : start + _BUCKET_BYTES], "big") for start in starts)
        return cls(sum(buckets), sum_us / 1e6, buckets)

    def within_s(self, part: float) -> float | None:
        """Return the bound within which `part` (0 to 1) of the messages were claimed, in seconds.

        It is the upper bound of a bucket, so the true time may be shorter. It is infinite in the last bucket,
        and None without a claimed message.
        """
        total = 0
        for bound, count in zip(WAIT_BOUNDS_S, self.buckets, strict=True):
            total += count
            if total and total >= part * self.count:
                return bound
        return None


@dataclass(frozen=True)
class QueueCounters:
    """The numbers of messages that the broker has handled in a queue since its first message.

    The counters are in Redis and only grow. No restart of a worker and no purge resets them. They begin again
    at 0 when the keys of the queue are deleted from Redis. At each moment ``pushed`` + ``replayed`` is the
    number of stored messages, in flight or not, plus ``finished``, ``discards_finished`` and ``dropped``.

    Attributes:
        pushed: Messages that were stored. Neither a repeated push of the same message counts, nor a call that
            dedup has declined. A message that was moved here counts.
        replayed: Dead letters that were sent again.
        claimed: Deliveries to workers of messages that are to run, also of messages that are moved to another
            queue.
        settled: Messages whose settle (Celery's early ack) reached the broker before their end, counted at
            their end. A short task often ends before its settle is sent.
        finished: Messages that have left their worker for good: they ran to their end, became dead letters
            there, or were moved to another queue. It is the difference of other counters and the in-flight
            messages.
        released: Messages that a worker has released, settled ones included.
        reaped: Messages that were reaped from a lost worker, settled ones included.
        leases_lost: Leases of workers that expired, with messages or without.
        stale_acks: Acks and releases that changed nothing, because the worker had lost the message to
            another one, or had no right to it any more. An ack that is repeated after a lost reply counts.
        discarded: Messages that became discards: cancelled, expired, dead, or covered by another call.
        cancelled: The discards that were cancelled.
        expired: The discards that expired.
        discards_finished: Discards whose end a worker has recorded.
        dead_lettered: Dead letters that were stored.
        full: Attempts to publish a message whose tenant had as many messages waiting as its ``max_waiting``.
            One call may try several times.
        overflowed: Messages that newer ones have pushed out of a full backlog. They are discards, too.
        dropped: Messages that were deleted before their end: purged, replaced by a later call with the
            same dedup key, unreadable, gone from Redis, or settled when they were released or reaped.
        waits_alone: Waiting times of claimed messages that were alone in line, those of quiet tenants: their
            tenant had no other message in line while they waited, and no worker had had them before.
        waits_in_line: Waiting times of all other claimed messages, those of noisy tenants.
    """

    pushed: int
    replayed: int
    claimed: int
    settled: int
    finished: int
    released: int
    reaped: int
    leases_lost: int
    stale_acks: int
    discarded: int
    cancelled: int
    expired: int
    discards_finished: int
    dead_lettered: int
    full: int
    overflowed: int
    dropped: int
    waits_alone: WaitingTimes
    waits_in_line: WaitingTimes

    def __add__(self, other: QueueCounters) -> QueueCounters:
        """Return the numbers of both, as of two partitions."""
        names = [field.name for field in fields(self)]
        return QueueCounters(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def titled(self) -> list[tuple[str, int]]:
        """The titles and the numbers that the dashboard shows."""
        return [(each.title, getattr(self, each.name)) for each in COUNTERS if each.title]

    @classmethod
    def read(cls, values: Sequence[bytes | None]) -> QueueCounters:
        """Return the counters from the values of :data:`COUNTER_FIELDS`, read at one moment."""
        *stored, discards_claimed, alone, in_line, in_flight = values
        counts = dict(zip(_STORED, (int(number(each)) for each in stored), strict=True))
        waits = WaitingTimes.unpack(alone), WaitingTimes.unpack(in_line)
        claimed = waits[0].count + waits[1].count
        # Of the messages that were given to workers, those are finished that are in none of the other states.
        left = claimed + int(number(discards_claimed)) - int(number(in_flight))
        finished = left - counts["released"] - counts["reaped"] - counts["discards_finished"]
        return cls(
            **counts,
            claimed=claimed,
            finished=max(finished, 0),
            waits_alone=waits[0],
            waits_in_line=waits[1],
        )


def oldest_waiting_s(
    partitions: Sequence[Partition], client: Client, places: Sequence[Sequence[str]] | None = None
) -> list[float | None]:
    """Return for each partition how long its oldest waiting message has waited; None when no message waits.

    Reads at most :data:`MOST_TENANTS` tenants, the next ones in turn first. With more tenants the result is
    the wait of the oldest message of those.

    Args:
        partitions: The partitions of the queue.
        client: The client.
        places: For each partition, those of :data:`PLACES` that have tenants. Default: all.
    """
    most = -(-MOST_TENANTS // len(partitions))
    step = min(most, TENANTS_PER_LOOK)
    chosen = [PLACES] * len(partitions) if places is None else places
    looks = [
        _oldest_waiting(partition, own, most, step) for partition, own in zip(partitions, chosen, strict=True)
    ]
    return run_rounds(client, looks, at_once=TENANTS_PER_TRIP // step)


def _oldest_waiting(
    partition: Partition, places: Iterable[str], most: int, step: int
) -> Rounds[float | None]:
    oldest = -1.0
    for place in places:
        first = 0
        while most > 0:
            found = yield partition.oldest_waiting(place=place, first=first, most=step)
            oldest = max((wait for wait in found if wait is not None and wait > oldest), default=oldest)
            first, most = first + len(found), most - len(found)
            if len(found) < step:
                break
    return None if oldest < 0 else oldest


def oldest_waiting_of(partition: Partition, tenants: Sequence[str]) -> Rounds[list[float | None]]:
    """Return for each tenant how long its oldest waiting message has waited; None without one."""
    ages: list[float | None] = []
    for start in range(0, len(tenants), TENANTS_PER_LOOK):
        ages += yield partition.oldest_waiting(tenants[start : start + TENANTS_PER_LOOK])
    return ages
