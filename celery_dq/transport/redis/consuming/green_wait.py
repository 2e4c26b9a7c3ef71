"""A wait of one thread or greenlet for the consumer thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from kombu.utils.eventio import ERR, READ, poll

from celery_dq.waker import Waker


class GreenWait:
    """Ends when another thread says so. In a greenlet, the others go on."""

    def __init__(self) -> None:
        self._waker = Waker()
        self._waker.fileno()
        self.is_over = self.is_failed = False

    def end(self) -> None:
        """End the pause, from any thread."""
        self.is_over = True
        self._waker.wake()

    def end_after(self, action: Callable[[], None]) -> None:
        """Run an action, and end the pause also after an error."""
        try:
            action()
        finally:
            self.end()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return whether it came in time."""
        until = time.monotonic() + timeout_s
        poller = poll()
        try:
            poller.register(self._waker.fileno(), READ | ERR)
            while not self.is_over and (left_s := until - time.monotonic()) > 0:
                poller.poll(left_s)
                self._waker.clear()
            return self.is_over
        finally:
            poller.close()
            self._waker.close()
