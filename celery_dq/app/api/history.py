"""``app.dq.history``: the rates and waiting times of a queue over the last hour.

The counters of a queue only grow, so that two samples of them give the rates between. The samples are kept in
a stream of Redis per queue. A sample is written by the program that looks at the queue, such as the
dashboard: no worker writes any. While no program looks, there are none, and the next point is the average of
the time between.
"""

from __future__ import annotations

import redis

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.inspector.queue_history import HistoryPoint, HistorySample, history_points
from celery_dq.inspector.queues import queue_snapshot
from celery_dq.inspector.redis_values import check_text, server_time_us, text
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
                if last_step > step:
                    # Another program wrote it, or the clock was set back: Redis takes no earlier entry.
                    client.delete(key)
                # Two processes may write one each in the same 15 seconds, which does no harm.
                client.xadd(key, {"s": sample.pack()}, maxlen=MAX_SAMPLES, approximate=False)
                client.pexpire(key, TTL_MS)
            except redis.ResponseError:
                return False
        return True

    def _key(self, queue: str) -> str:
        options = self._broker.options
        return history_stream(options.environment, queue, options.key_prefix)


def _at_ms(entry_id: bytes) -> int:
    return int(text(entry_id).partition("-")[0])
