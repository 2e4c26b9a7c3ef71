"""Samples of the queues that users look at, for their history."""

from __future__ import annotations

import threading
import time

from celery_dq.app.api.api import DQ
from celery_dq.app.api.history import STEP_MS
from celery_dq.contrib.django.dashboard.broker_reads import failure_of
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)

#: Seconds after the last look at a queue for which it is sampled.
WATCHED_S = 3600.0
#: Queues that are sampled, at most: those that were looked at last.
MOST_QUEUES = 50


class Sampler:
    """Samples the counters of queues in a thread, which runs while there are any. Thread-safe.

    Each process has one. Several processes share the samples in Redis, and one of them writes each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Name of a queue -> the time until which it is sampled.
        self._until: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Sample no queue any more, and wait for the sample under way."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, dq: DQ, queue: str) -> None:
        """Sample a queue from now on, and for an hour after the last call. Does not wait."""
        with self._lock:
            self._until.pop(queue, None)
            self._until[queue] = time.monotonic() + WATCHED_S
            while len(self._until) > MOST_QUEUES:
                del self._until[next(iter(self._until))]
            if self._thread is None:
                # The end of the process does not wait for a daemon thread.
                self._thread = threading.Thread(
                    target=self._run, args=(dq,), name="dq-dashboard-history", daemon=True
                )
                self._thread.start()

    def _run(self, dq: DQ) -> None:
        while queues := self._watched():
            for queue in queues:
                self._sample(dq, queue)
            if self._stopped.wait(STEP_MS / 1000):
                return

    def _watched(self) -> list[str]:
        """Return the queues to sample; without any, the thread ends."""
        with self._lock:
            now = time.monotonic()
            self._until = {queue: until for queue, until in self._until.items() if until > now}
            if not self._until:
                self._thread = None
            return [*self._until]

    @staticmethod
    def _sample(dq: DQ, queue: str) -> None:
        try:
            dq.history.sample(queue)
        except Exception as exc:
            # The pages show a failure of the broker; here it means a gap.
            if failure_of(exc) is None:
                logger.exception(
                    "Queue %s could not be sampled.", queue, extra={"event": "history_not_sampled"}
                )
