"""The bell that wakes the wait of a loop, rung by others whatever the loop is about."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from celery_dq.clock import SystemClock
from celery_dq.transport.redis.poller import Poller


class ClosesMeanwhile:
    """As if another thread closed the poller, and opened a pipe, when this one comes to a line of `_ring`."""

    def __init__(self, poller: Poller, line: int) -> None:
        self.poller = poller
        self.left = line
        self.pipe: tuple[int, int] | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_name != "_ring":
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.poller.close()
                self.pipe = os.pipe()  # it has the numbers of what was closed
        return self


def test_who_rings_while_the_poller_closes_harms_nobody() -> None:
    line, meets = 1, True
    while meets:
        poller = Poller(SystemClock())
        poller.interrupt()
        with suppress(TimeoutError):
            poller.get(None, timeout=0)
        before = sys.gettrace()
        sys.settrace(other := ClosesMeanwhile(poller, line))
        try:
            poller.interrupt()
        finally:
            sys.settrace(before)
        meets = other.pipe is not None
        if other.pipe is not None:
            reader, writer = other.pipe
            os.set_blocking(reader, False)
            with pytest.raises(BlockingIOError):
                os.read(reader, 1)
            os.close(reader)
            os.close(writer)
        poller.close()
        line += 1
    assert line > 3
