"""The beginning of a warm shutdown: the boot step that wakes a worker at once when it is to stop.

The steps after it are in the order of Celery's blueprint: ``ready_requests`` releases requests that wait for
their turn, ``transport/redis/consuming/channel_consumer.py`` releases messages that were claimed ahead
(``release.lua``), the pool ends its tasks, whose acks ``transport/redis/in_flight/heartbeat.py`` sends, and
gives the lease back (``resign.lua``).

The handlers of Celery's signals set a flag for the event loop, and do not wake it: Python resumes the wait
that the signal has interrupted. The loop of a stock worker on Redis wakes every second, to poll its broker.
On a tenant broker the loop sleeps until there is an event or a timer is due, for up to five seconds. During
that time an embedded beat would continue, and singleton queues would not be handed over.

A pool of greenlets has no such loop. There Celery waits for messages two seconds at a time, and waits once
more after it has read the flag. The wait on a tenant broker can be interrupted, and is not repeated then.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps, signals

from celery_dq.transport.redis.consuming.poller import Poller
from celery_dq.waker import Waker


class PromptStopStep(bootsteps.StartStopStep):
    """Wakes the consumer's event loop, or its poller where there is no loop, when the worker is to stop."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        # Waking the loop is enough: the loop reads the flag.
        self._waker = Waker(lambda: None)
        self._poller: Poller | None = None

    def start(self, consumer: Any) -> None:
        """Register the reader again: the loop forgets its readers at every reconnect."""
        if consumer.hub is None:
            if self._poller is None:
                signals.worker_shutting_down.connect(self._interrupt)
            cycle = getattr(consumer.connection.transport, "cycle", None)
            self._poller = cycle if isinstance(cycle, Poller) else None
            return
        signals.worker_shutting_down.connect(self._wake)
        self._waker.attach(consumer.hub)

    def shutdown(self, consumer: Any) -> None:
        """Disconnect the signals and close the sockets: the worker ends."""
        signals.worker_shutting_down.disconnect(self._wake)
        signals.worker_shutting_down.disconnect(self._interrupt)
        self._waker.close()

    def _interrupt(self, **_: Any) -> None:
        if self._poller is not None:
            self._poller.interrupt()

    def _wake(self, **_: Any) -> None:
        self._waker.wake()
