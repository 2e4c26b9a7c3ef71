"""``app.dq.history``: the rates and waiting times of a queue over the last hour.

The counters of a queue only grow, so that two samples of them give the rates between. The samples are kept in
a stream of Redis per queue. A sample is written by the program that looks at the queue, such as the
dashboard: no worker writes any. While no program looks, there are none, and the next point is the average of
the time between.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

import redis

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.inspector.queue_counters import WAIT_BOUNDS_S, QueueCounters, WaitingTimes
from celery_dq.inspector.queues import queue_snapshot
from celery_dq.inspector.redis_values import check_text, moment, server_time_us, text
from celery_dq.keys import history_stream

#: Milliseconds between two samples, whichever process writes them.
STEP_MS = 15_000
#: Samples that are kept: those of an hour.
MAX_SAMPLES = 241
#: Milliseconds after the last sample at which Redis deletes all of a queue.
TTL_MS = 4_000_000


class HistoryApi:
    """The histories of queues."""

    def __init__(self, broker: BrokerAccess) -> None:
        self._broker = broker

    def __call__(self, queue: str) -> list[HistoryPoint]:
        """Return the last hour of a queue, as far as it was sampled, the earliest point first."""
        check_text("queue", queue)
        with self._broker.channel() as channel:
            now_ms = server_time_us(channel.client) // 1000
            # No sample of ours is later than the clock of the server.
            rows = channel.client.xrevrange(self._key(queue), max=now_ms, count=MAX_SAMPLES)
        found = [HistorySample.unpack(_at_ms(row), text(fields.get(b"s", b""))) for row, fields in rows[::-1]]
        return history_points([each for each in found if each is not None])

    def sample(self, queue: str) -> bool:
        """Write a sample of a queue, unless a process has done so in the same 15 seconds.

        Returns:
            Whether the sample was written. It is not, either, where Redis refuses to write: its memory is
            full, it is a replica, or its user may not.
        """
        with self._broker.open(queue) as (partitions, client):
            key, latest = self._key(queue), client.xrevrange(self._key(queue), count=1)
            step = server_time_us(client) // 1000 // STEP_MS
            last_step = _at_ms(latest[0][0]) // STEP_MS if latest else -1
            if 0 <= last_step - step <= 1:
                return False
            now = queue_snapshot(partitions, client)
            sample = HistorySample.of(0, now.waiting, now.oldest_waiting_s, now.counters)
            try:
                # Two processes may write one each in the same 15 seconds, which does no harm. The transaction
                # keeps one of them from removing what the other has just written.
                with client.pipeline(transaction=True) as pipe:
                    if last_step > step:
                        # Another program wrote it, or the clock was set back: Redis takes no earlier entry.
                        pipe.delete(key)
                    pipe.xadd(key, {"s": sample.pack()}, maxlen=MAX_SAMPLES, approximate=False)
                    pipe.pexpire(key, TTL_MS)
                    pipe.execute()
            except redis.ResponseError:
                return False
        return True

    def _key(self, queue: str) -> str:
        options = self._broker.options
        return history_stream(options.environment, queue, options.key_prefix)


def _at_ms(entry_id: bytes) -> int:
    return int(text(entry_id).partition("-")[0])


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
