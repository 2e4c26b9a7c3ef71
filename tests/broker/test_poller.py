"""The poller, when sockets are closed or reused while it waits or is woken."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from celery_dq.clock import SystemClock
from celery_dq.transport.redis.consuming.poller import Poller
from celery_dq.waker import Waker
from tests.broker.kombu_client import KombuClient, bodies


class ClosesMeanwhile:
    """Trace function: closes the poller and opens a pipe at a line of `Waker.wake`, as a thread may."""

    def __init__(self, poller: Poller, line: int) -> None:
        self.poller = poller
        self.left = line
        self.pipe: tuple[int, int] | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is not Waker.wake.__code__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.poller.close()
                self.pipe = os.pipe()  # reuses the closed file descriptors
        return self


def test_an_event_for_a_reused_file_descriptor_starts_no_read(kombu_client: KombuClient) -> None:
    with (
        kombu_client.connect(transport_options={"socket_timeout": 2.0}) as connection,
        kombu_client.consuming(connection) as got,
    ):
        channel = connection.default_channel
        tokens = channel.consumer.fetcher.wakeups.groups[0]
        kombu_client.drain_until(connection, lambda: tokens.is_waiting)
        for each in channel.connections():
            assert channel.poller._read(each.connection._sock.fileno()) is False, each.kind
        kombu_client.publish(1)
        assert bodies(kombu_client.drain(connection, got, 1)) == [1]
        got[0].ack()


def test_a_wake_while_the_poller_closes_writes_to_no_reused_file_descriptor() -> None:
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
