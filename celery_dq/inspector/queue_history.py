"""The history of a queue: rates and waiting times between samples of its counters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from celery_dq.inspector.queue_counters import WAIT_BOUNDS_S, QueueCounters, WaitingTimes
from celery_dq.inspector.redis_values import moment

#: Amounts from here on are not ours: counters in Redis have 64 bits.
MOST = 2**63


@dataclass(frozen=True)
class HistorySample:
    """The counters of a queue at one moment.

    Attributes:
        at_ms: Time of the server, ms.
        waiting: Number of waiting messages.
        oldest_s: How long the oldest waiting message has waited; None without one.
        published: Number of published and replayed messages since the first one.
        claimed: Number of claimed messages.
        finished: Number of finished messages.
        buckets: Number of claimed messages by waiting time.
    """

    at_ms: int
    waiting: int
    oldest_s: float | None
    published: int
    claimed: int
    finished: int
    buckets: tuple[int, ...]

    @classmethod
    def of(cls, at_ms: int, waiting: int, oldest_s: float | None, counters: QueueCounters) -> HistorySample:
        """Return the sample of a queue."""
        waits = counters.waits_alone + counters.waits_in_line
        published = counters.pushed + counters.replayed
        return cls(at_ms, waiting, oldest_s, published, counters.claimed, counters.finished, waits.buckets)

    def pack(self) -> str:
        """Return the sample as text, without its time."""
        numbers = (self.waiting, self.oldest_s, self.published, self.claimed, self.finished, self.buckets)
        return json.dumps(numbers, separators=(",", ":"))

    @classmethod
    def unpack(cls, at_ms: int, packed: str) -> HistorySample | None:
        """Return a sample; None for a text of another form, which another program has written."""
        try:
            waiting, oldest_s, published, claimed, finished, buckets = json.loads(packed)
        except (ValueError, TypeError, RecursionError):
            return None
        if not isinstance(buckets, list) or len(buckets) != len(WAIT_BOUNDS_S):
            return None
        oldest = () if oldest_s is None else (oldest_s,)
        if not all(map(_is_amount, (waiting, *oldest, published, claimed, finished, *buckets))):
            return None
        return cls(at_ms, waiting, oldest_s, published, claimed, finished, tuple(buckets))


@dataclass(frozen=True)
class HistoryPoint:
    """A queue between two samples.

    Attributes:
        at: Time of the second sample.
        waiting: Number of waiting messages at that time.
        oldest_s: How long the oldest waiting message had waited then, in seconds; None without one.
        published_per_s: Messages that were published or replayed, per second.
        claimed_per_s: Messages that workers have claimed, per second.
        finished_per_s: Messages that have ended, per second.
        p50_s: Half of the claimed messages had waited at most so long. It is the upper bound of a bucket,
            infinite above an hour, and None if none was claimed.
        p95_s: 95 % of them had waited at most so long.
        p99_s: 99 % of them had waited at most so long.
    """

    at: datetime | None
    waiting: int
    oldest_s: float | None
    published_per_s: float
    claimed_per_s: float
    finished_per_s: float
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None


def history_points(samples: Sequence[HistorySample]) -> list[HistoryPoint]:
    """Return the points between samples, the earliest first. Counters that began again at 0 give none."""
    return [
        _point(before, after)
        for before, after in pairwise(samples)
        if after.at_ms > before.at_ms
        and after.published >= before.published
        and all(b <= a for b, a in zip(before.buckets, after.buckets, strict=True))
    ]


def _is_amount(value: object) -> bool:
    """Return whether a value is a finite number of messages or seconds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MOST


def _point(before: HistorySample, after: HistorySample) -> HistoryPoint:
    seconds = (after.at_ms - before.at_ms) / 1000
    buckets = tuple(a - b for b, a in zip(before.buckets, after.buckets, strict=True))
    waits = WaitingTimes(sum(buckets), 0.0, buckets)
    return HistoryPoint(
        moment(after.at_ms * 1000),
        after.waiting,
        after.oldest_s,
        *(
            round(max(getattr(after, name) - getattr(before, name), 0) / seconds, 3)
            for name in ("published", "claimed", "finished")
        ),
        *(waits.within_s(part) for part in (0.5, 0.95, 0.99)),
    )
