"""Wakes the delivery of messages: an event loop through a pair of sockets, or a waiting ``drain_events``.

A closed socket object refuses a late write. A late write to a pipe could hit a reused file descriptor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Waker:
    """Wakes the delivery of one connection.

    Args:
        new_event: Makes an event that fits this kind of process (threads or greenlets).
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._event = new_event()
        self._pid = os.getpid()
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._loop: Any = None
        self._pending = False

    def wake(self) -> None:
        """Wake the delivery; callable from any thread."""
        self._event.set()
        pair = self._pair
        if pair is None or self._pending or self._pid != os.getpid():
            return
        self._pending = True
        try:
            pair[1].send(b"!")
        except OSError as error:
            logger.debug("The event loop could not be woken: %r.", error)

    def wait(self, timeout_s: float) -> None:
        """Wait until :meth:`wake` is called, for at most `timeout_s` seconds."""
        self._event.wait(timeout_s)
        self._event.clear()

    def attach_loop(self, loop: Any, answer: Callable[[], None]) -> None:
        """Call `answer` in this kombu event loop after each :meth:`wake`."""
        self.detach_loop()
        if self._pair is None:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
        self._loop = loop

        def on_readable() -> None:
            with contextlib.suppress(BlockingIOError):
                pair[0].recv(4096)
            # Reset the flag after the socket is emptied. A wake-up in between writes no byte, and the call
            # below serves it. In the opposite order, its byte could be read with the flag still set, and no
            # later wake-up would write one.
            self._pending = False
            answer()

        pair = self._pair
        loop.add_reader(pair[0].fileno(), on_readable)
        # Deliver messages that arrived before the loop was attached.
        self.wake()

    def detach_loop(self) -> None:
        """Remove the reader from the event loop."""
        loop, self._loop = self._loop, None
        # A forked child shares the kernel's epoll list with its parent and must not change it.
        if loop is not None and self._pair is not None and self._pid == os.getpid():
            loop.remove_reader(self._pair[0].fileno())

    @property
    def is_attached(self) -> bool:
        """Whether an event loop is attached."""
        return self._loop is not None

    def close(self) -> None:
        """Detach from the event loop and close the sockets."""
        self.detach_loop()
        pair, self._pair = self._pair, None
        if pair is not None:
            for end in pair:
                end.close()
