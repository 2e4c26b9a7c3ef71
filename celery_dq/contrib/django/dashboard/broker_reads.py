"""Reads of the broker with a deadline, and the pages of errors. All viewers share a result for a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from typing import Any, TypeVar

import redis
from kombu.exceptions import OperationalError

from celery_dq.errors import ConfigurationError, DQError
from celery_dq.shared_reading import SharedReading


class BrokerSilent(DQError, ConnectionError):
    """The broker has not answered within the deadline of a page."""


@dataclass(frozen=True)
class Failure:
    """A page that cannot be shown.

    Attributes:
        status: HTTP status of the page.
        title: The failure in a few words.
        reason: The text of the error.
        remedy: The next step of the user.
    """

    status: int
    title: str
    reason: str
    remedy: str


_DOCTOR = "Check that it runs and that the network reaches it. 'celery dq doctor' checks all servers."


def failure_of(error: Exception) -> Failure | None:
    """Return the page of an error; None for a fault of the program, which must not be hidden."""
    reason = (str(error) or type(error).__name__).rstrip(".")
    if isinstance(error, BrokerSilent):
        return Failure(503, "The broker does not answer", reason, _DOCTOR)
    if isinstance(error, ConfigurationError):
        return Failure(503, "The app cannot show this", reason, "'celery dq doctor' checks the settings.")
    if isinstance(error, redis.exceptions.NoPermissionError):
        remedy = "The guide 'Operating' lists the rights of the role 'operator'."
        return Failure(503, "The Redis user of broker_url lacks a right", reason, remedy)
    # An error of celery-dq about a server is a ConnectionError as well, which is an OSError.
    if isinstance(error, (OperationalError, redis.ConnectionError, redis.TimeoutError, OSError)):
        return Failure(503, "The broker cannot be reached", reason, _DOCTOR)
    if isinstance(error, redis.RedisError):
        return Failure(503, "Redis refuses the request", reason, _DOCTOR)
    if isinstance(error, ImportError):
        return Failure(503, "A library is missing", reason, "Install the libraries that broker_url needs.")
    if isinstance(error, UnicodeEncodeError):
        remedy = "A program other than Celery has written it; delete it in Redis."
        return Failure(503, "A stored name is not valid Unicode", reason, remedy)
    if isinstance(error, DQError):
        return Failure(400, "The request cannot be answered", reason, "Go back, and correct it.")
    return None


T = TypeVar("T")

#: Seconds for which a page waits for the broker.
DEADLINE_S = 3.0
#: Reads that may wait for the broker at the same time, and as many changes. Each borrows a connection of the
#: app's pool, which has ten by default and serves the publishing calls of the web process, too.
MOST_WAITING = 4


class BrokerReads:
    """Calls of the broker in threads, so that a page can answer without it. Thread-safe; one per process.

    A call that outlasts the deadline continues in its thread until its connection times out.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._reads: dict[Hashable, SharedReading[Any]] = {}
        self._reading = BoundedSemaphore(MOST_WAITING)
        self._changing = BoundedSemaphore(MOST_WAITING)

    def get(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return the result of `read`, or the one that another viewer has got within the last second.

        Viewers that come while a read is under way wait for the same one. Its error is shared, too.

        Args:
            key: Identifies the read.
            read: Reads the broker; it runs in another thread.

        Raises:
            BrokerSilent: The deadline is over, or too many calls wait for the broker.
        """
        now = time.monotonic()
        with self._lock:
            self._reads = {each: kept for each, kept in self._reads.items() if kept.is_fresh(now)}
            is_first = key not in self._reads
            found: SharedReading[T] = self._reads.setdefault(key, SharedReading(now))
        return self._result(found, read if is_first else None, self._reading)

    def change(self, call: Callable[[], T]) -> T:
        """Return the result of a call that changes something. Reads that began before it serve no viewer.

        Raises:
            BrokerSilent: The deadline is over, and it is not known whether the call had an effect; or too
                many calls wait for the broker, and it was not made.
        """
        try:
            return self._result(SharedReading(), call, self._changing)
        finally:
            with self._lock:
                self._reads.clear()

    @staticmethod
    def _result(reading: SharedReading[T], call: Callable[[], T] | None, slots: BoundedSemaphore) -> T:
        """Wait for a reading, which the first viewer starts by `call`."""
        latest = time.monotonic() + DEADLINE_S
        if call is not None and slots.acquire(timeout=DEADLINE_S):
            reading.add_done_callback(lambda _: slots.release())
            reading.start("dq-dashboard", call)
        elif call is not None:
            reading.set_exception(BrokerSilent(f"{MOST_WAITING} earlier requests still wait for it"))
        if not reading.ends_within(latest - time.monotonic()):
            raise BrokerSilent(f"no answer within {DEADLINE_S:g} s")
        return reading.result()
