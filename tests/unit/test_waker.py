"""Wakes an event loop from other threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from kombu.asynchronous import Hub
from kombu.utils.eventio import READ, poll

from celery_dq.waker import Waker
from tests.unit.test_app_context import in_child


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close()


def turn(hub: Hub) -> None:
    """Run the loop until one event has been handled."""
    hub.call_later(10, lambda: None)
    next(hub.loop)


def readable(waker: Waker) -> bool:
    poller = poll()
    poller.register(waker.fileno(), READ)
    try:
        return bool(poller.poll(0))
    finally:
        poller.close()


def test_wake_ups_of_another_thread_are_answered_once(hub: Hub) -> None:
    calls: list[int] = []
    waker = Waker(lambda: calls.append(threading.get_ident()))
    waker.attach(hub)

    def wake_thrice() -> None:
        for _ in range(3):
            waker.wake()

    thread = threading.Thread(target=wake_thrice)
    thread.start()
    turn(hub)
    thread.join(30)
    assert set(calls) == {threading.get_ident()}
    before = len(calls)
    waker.wake()
    turn(hub)
    assert len(calls) > before
    waker.close()


def test_a_wake_up_during_the_answer_is_answered_too(hub: Hub) -> None:
    calls: list[int] = []

    def answer() -> None:
        calls.append(1)
        if len(calls) == 1:
            waker.wake()

    waker = Waker(answer)
    waker.attach(hub)
    waker.wake()
    turn(hub)
    turn(hub)
    assert len(calls) == 2
    assert not readable(waker)
    waker.close()


def test_a_loop_that_has_forgotten_its_readers_is_attached_again(hub: Hub) -> None:
    calls: list[int] = []
    waker = Waker(lambda: calls.append(1))
    waker.attach(hub)
    waker.wake()
    hub.reset()
    waker.attach(hub)
    turn(hub)
    assert calls == [1]
    waker.close()


def test_a_closed_waker_does_nothing_and_can_be_used_again(hub: Hub) -> None:
    calls: list[int] = []
    waker = Waker(lambda: calls.append(1))
    waker.wake()
    waker.attach(hub)
    waker.wake()
    waker.close()
    assert hub.readers == {}
    assert not waker.is_attached
    waker.wake()
    waker.attach(hub)
    waker.wake()
    turn(hub)
    assert calls == [1]
    waker.close()


def test_a_forked_child_does_not_disturb_its_parent(hub: Hub) -> None:
    waker = Waker(lambda: None)
    waker.attach(hub)

    def of_child() -> str:
        waker.wake()
        waker.close()
        return "closed"

    assert in_child(of_child) == "closed"
    assert not readable(waker)
    waker.wake()
    assert readable(waker)
    assert hub.poller.poll(0)
    waker.close()


class ClosesMeanwhile:
    """A tracer that closes a waker before the line `left` of its ``wake``, as another thread may.

    Attributes:
        pipe: Has got the closed file descriptors; None while that line was not reached.
    """

    def __init__(self, waker: Waker, left: int) -> None:
        self.waker = waker
        self.left = left
        self.pipe: tuple[int, int] | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is not Waker.wake.__code__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.waker.close()
                self.pipe = os.pipe()
        return self


def test_a_wake_while_another_thread_closes_writes_to_no_reused_file_descriptor() -> None:
    line, meets = 1, True
    while meets:
        waker = Waker()
        fd = waker.fileno()
        before = sys.gettrace()
        sys.settrace(other := ClosesMeanwhile(waker, line))
        try:
            waker.wake()
        finally:
            sys.settrace(before)
        meets = other.pipe is not None
        if other.pipe is not None:
            reader, writer = other.pipe
            assert fd in other.pipe
            os.set_blocking(reader, False)
            with pytest.raises(BlockingIOError):
                os.read(reader, 1)
            os.close(reader)
            os.close(writer)
        waker.close()
        line += 1
    assert line > 3
