"""A flag for which one thread waits, and that a signal handler may set or wait for, too."""

from __future__ import annotations

import contextlib
import threading

__all__ = ["WakeFlag"]


class WakeFlag:
    """A :class:`threading.Event` for one waiter, without the lock that the methods of an event hold.

    At a cold shutdown, a signal handler closes the connection. It may have interrupted a method of the same
    object: with an event, it would wait for its own thread forever.
    """

    def __init__(self) -> None:
        #: Free while the flag is set.
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def is_set(self) -> bool:
        """Whether the flag is set."""
        return not self._lock.locked()

    def set(self) -> None:
        """Set the flag, and wake the waiter."""
        with contextlib.suppress(RuntimeError):  # it is set
            self._lock.release()

    def clear(self) -> None:
        """Reset the flag."""
        while self._lock.acquire(blocking=False):
            pass  # the lock of a green thread counts its releases

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, and reset it; return False after `timeout_s` seconds."""
        # A lock refuses longer waits.
        return self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
