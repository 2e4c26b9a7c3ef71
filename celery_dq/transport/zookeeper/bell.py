"""Wakes whoever delivers messages: an event loop by a pipe, or a waiting ``drain_events``."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Bell:
    """One per connection.

    Arguments:
        new_event: makes an event that fits this kind of process (threads or greenlets).
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._event = new_event()
        self._pid = os.getpid()
        self._pipe: tuple[int, int] | None = None
        self._loop: Any = None
        self._rung = False

    def ring(self) -> None:
        """Wake, from any thread."""
        self._event.set()
        pipe = self._pipe
        if pipe is None or self._rung or self._pid != os.getpid():
            return
        self._rung = True
        try:
            os.write(pipe[1], b"!")
        except OSError as error:
            logger.debug("The event loop could not be woken: %r.", error)

    def wait(self, timeout_s: float) -> None:
        """Wait until it rings, or for this many seconds."""
        self._event.wait(timeout_s)
        self._event.clear()

    def hang_on(self, loop: Any, answer: Callable[[], None]) -> None:
        """Call `answer` in this kombu event loop whenever it rings."""
        self.take_off()
        if self._pipe is None:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
        self._loop = loop

        def heard() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(pipe[0], 4096)
            # After the pipe was emptied: a ring in between writes nothing, and is answered below. The other
            # way round its byte could be read away, and every later ring would believe it still there.
            self._rung = False
            answer()

        pipe = self._pipe
        loop.add_reader(pipe[0], heard)
        # What came before the loop did.
        self.ring()

    def take_off(self) -> None:
        """Let go of the loop."""
        loop, self._loop = self._loop, None
        # The kernel keeps one interest list for a process and its children: a child must not touch it.
        if loop is not None and self._pipe is not None and self._pid == os.getpid():
            loop.remove_reader(self._pipe[0])

    @property
    def hangs(self) -> bool:
        """Whether an event loop listens."""
        return self._loop is not None

    def close(self) -> None:
        """Give the file descriptors back."""
        self.take_off()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            for end in pipe:
                os.close(end)
