"""Wakes an event loop, or another waiter on a file descriptor, from any thread or signal handler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from celery_dq.native import unpatched
from celery_dq.per_process import OwnerProcess, current_pid
from celery_dq.shown import shown_logger

__all__ = ["Waker"]

logger = shown_logger(__name__)


class Waker:
    """A pair of sockets whose reader a kombu event loop watches, or another waiter.

    A closed socket object refuses a late write. A late write to a pipe could hit a reused file descriptor.
    The sockets are those of the interpreter: one of gevent or eventlet belongs to the hub of one thread.

    Args:
        on_wake: Called in the loop after each :meth:`wake`; several may cause one call. None for a waiter
            that watches :meth:`fileno` itself.
    """

    def __init__(self, on_wake: Callable[[], object] | None = None) -> None:
        self._on_wake = on_wake
        self._owner = OwnerProcess()
        self._pair: Any = None
        self._loop: Any = None
        #: Whether a wake-up was sent that :meth:`clear` has not read. Only this class changes it.
        self.is_pending = False

    @property
    def is_attached(self) -> bool:
        """Whether an event loop is attached."""
        return self._loop is not None

    def fileno(self) -> int:
        """Return the file descriptor to watch, of sockets that are opened at the first call."""
        if self._pair is None:
            self._pair = unpatched("_socket", "socketpair")()
            for end in self._pair:
                end.setblocking(False)
            # Without sockets, an earlier wake had no effect.
            self.is_pending = False
        return int(self._pair[0].fileno())

    def wake(self) -> None:
        """Wake the waiter. Takes no lock, because a signal handler may interrupt the holder of any lock."""
        pair = self._pair  # another thread may close it
        # The process is compared last, because that is a system call.
        if pair is None or self.is_pending or self._owner.pid != current_pid():
            return
        self.is_pending = True
        try:
            pair[1].send(b"!")
        except BlockingIOError:
            pass  # the buffer is full, so the wait ends anyway
        except OSError as error:
            self.is_pending = False
            logger.debug("A waiting thread could not be woken: %r.", error)

    def clear(self) -> None:
        """Read the wake-ups, and call `on_wake`."""
        if self._pair is not None:
            with contextlib.suppress(BlockingIOError):
                self._pair[0].recv(4096)
        # Reset after recv(): the call below serves a wake-up in between, which writes no byte. In the
        # opposite order its byte could be read with the flag still set, and no later one would write.
        self.is_pending = False
        if self._on_wake is not None:
            self._on_wake()

    def attach(self, loop: Any) -> None:
        """Watch the sockets in this kombu event loop. A loop forgets its readers at every reconnect."""
        if self._loop is not loop:
            self.detach()
        self._loop = loop
        loop.add_reader(self.fileno(), self.clear)

    def detach(self) -> None:
        """Remove the reader from the event loop."""
        loop, self._loop = self._loop, None
        # A forked child shares the kernel's epoll list with its parent, and must not change it.
        if loop is not None and self._pair is not None and self._owner.is_current:
            loop.remove_reader(self._pair[0].fileno())

    def close(self) -> None:
        """Detach from the event loop, and close the sockets; :meth:`fileno` opens new ones."""
        self.detach()
        pair, self._pair = self._pair, None
        if pair is not None:
            for end in pair:
                end.close()
