"""A flag for which one thread or greenlet waits, and that any thread or signal handler may set."""

from __future__ import annotations

import time
from typing import Any

from kombu.utils.eventio import ERR, READ, poll

from celery_dq.native import is_in_green_hub
from celery_dq.waker import Waker

__all__ = ["WakeFlag"]

#: Longest single wait in seconds, which every poller of kombu accepts.
MAX_WAIT_S = 3600.0


class WakeFlag:
    """A :class:`threading.Event` for one waiter, without a lock: a native thread may set it for a greenlet.

    At a cold shutdown, a signal handler closes the connection. It may have interrupted a method of the same
    object: with an event, it would wait for its own thread for ever. The waiter watches sockets, so that
    other greenlets of its thread go on. They are opened by the first wait, and :meth:`close` closes them.
    """

    def __init__(self) -> None:
        self._waker = Waker()
        self._poller: Any = None
        #: Whether the flag is set.
        self.is_set = False

    def set(self) -> None:
        """Set the flag, and wake the waiter."""
        self.is_set = True
        self._waker.wake()

    def clear(self) -> None:
        """Reset the flag."""
        self._waker.clear()
        self.is_set = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, and reset it; return False after `timeout_s` seconds.

        In the loop of gevent or eventlet, which runs signal handlers and may not wait, it only looks.
        """
        if not self.is_set and not is_in_green_hub():
            if self._poller is None:
                self._poller = poll()
                self._poller.register(self._waker.fileno(), READ | ERR)
            until = time.monotonic() + timeout_s
            # Looked at after the sockets were opened: an earlier set() has written nothing to them.
            while not self.is_set and (left_s := until - time.monotonic()) > 0:
                self._poller.poll(min(left_s, MAX_WAIT_S))
                self._waker.clear()
        was_set = self.is_set
        if was_set:  # else a set() in between would be lost
            self.clear()
        return was_set

    def close(self) -> None:
        """Close the sockets."""
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.close()
        self._waker.close()
