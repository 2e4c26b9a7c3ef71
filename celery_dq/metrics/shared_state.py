"""One reading of the broker's state for concurrent requests, with a deadline."""

from __future__ import annotations

import threading

from celery_dq.clock import Clock, SystemClock
from celery_dq.metrics.state import BrokerState, StateReader
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger

__all__ = ["SharedState"]

logger = shown_logger(__name__)

#: Seconds for which a reading is used again, so that several scrapers cost the broker one reading.
MAX_AGE_S = 1.0


class _MetricsReading:
    """A reading that another thread fills."""

    def __init__(self, state: BrokerState, started: float) -> None:
        self.state = state
        self.started = started
        self.ended = threading.Event()


class SharedState:
    """Returns the state of the broker, not older than a second, within a deadline. Thread-safe.

    A thread reads; there is never more than one. A caller waits for it until the deadline of the reading, and
    then gets what has been read by then. Every further caller gets that too, until the reading has ended.

    Args:
        reader: Reads the state.
        timeout_s: The deadline of a reading, in seconds.
        clock: Measures the age of readings.
    """

    def __init__(self, reader: StateReader, timeout_s: float, clock: Clock | None = None) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._outage = Outage(logger, "metrics_outage", self._clock)
        self._latest: _MetricsReading | None = None

    def get(self) -> BrokerState:
        """Return a reading, which is incomplete if the servers do not answer in time. Never raises."""
        with self._lock:
            now, latest = self._clock.monotonic(), self._latest
            if latest is None or (latest.ended.is_set() and now - latest.started >= MAX_AGE_S):
                latest = self._latest = _MetricsReading(self._reader.begin(), now)
                threading.Thread(
                    target=self._read, args=(latest,), name="dq-metrics-reading", daemon=True
                ).start()
        latest.ended.wait(max(latest.started + self._timeout_s - now, 0.0))
        return latest.state

    def _read(self, reading: _MetricsReading) -> None:
        try:
            self._reader.read(reading.state)
        except Exception as exc:
            self._outage.began(
                "The state of the broker cannot be read for the metrics: %s. The metric celery_dq_up or "
                "celery_dq_elections_up is 0 until it can; 'celery dq doctor' checks all servers.",
                (str(exc) or type(exc).__name__).rstrip("."),
            )
        else:
            took_s = self._clock.monotonic() - reading.started
            if took_s <= self._timeout_s:
                self._outage.over("The state of the broker can be read for the metrics again.")
            else:
                self._outage.began(
                    "Reading the state of the broker for the metrics took %.1f s, longer than "
                    "dq_metrics_timeout (%.1f s), so scrapes lack queues or leaders. Set a longer time.",
                    took_s,
                    self._timeout_s,
                )
        finally:
            reading.state.duration_s = self._clock.monotonic() - reading.started
            reading.ended.set()
