"""The boot step that lets a worker hear at once that it is to stop.

The handlers of Celery's signals leave a note for the event loop, and do not wake it: Python goes on with
the wait that the signal has interrupted. The loop of a stock worker on Redis wakes every second, because it
asks its broker anew. On a tenant broker it sleeps until something happens or a timer is due, for up to five
seconds. As long, an embedded beat would go on, and what is led would not be handed over.

A pool of greenlets has no such loop: there Celery waits for messages two seconds at a time, and once more
when it has read the note. A tenant broker's wait can be ended from outside, and begins no other one.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from celery import bootsteps, signals

from celery_dq.transport.redis.poller import Poller


class PromptStopStep(bootsteps.StartStopStep):
    """Wakes the consumer's event loop, or who waits where there is none, when the worker is told to stop."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._pipe: tuple[int, int] | None = None
        self._poller: Poller | None = None

    def start(self, consumer: Any) -> None:
        """The loop forgets its readers at every reconnect."""
        if consumer.hub is None:
            if self._poller is None:
                signals.worker_shutting_down.connect(self._interrupt)
            cycle = getattr(consumer.connection.transport, "cycle", None)
            self._poller = cycle if isinstance(cycle, Poller) else None
            return
        if self._pipe is None:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            signals.worker_shutting_down.connect(self._ring)
        consumer.hub.add_reader(self._pipe[0], self._heard)

    def shutdown(self, consumer: Any) -> None:
        """The worker ends."""
        signals.worker_shutting_down.disconnect(self._ring)
        signals.worker_shutting_down.disconnect(self._interrupt)
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            consumer.hub.remove_reader(pipe[0])
            for end in pipe:
                os.close(end)

    def _interrupt(self, **_: Any) -> None:
        if self._poller is not None:
            self._poller.interrupt()

    def _ring(self, **_: Any) -> None:
        # In a signal handler, which may have interrupted anything: so no lock.
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], b"!")

    def _heard(self) -> None:
        # That the loop turns is all: it reads the note by itself.
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)
