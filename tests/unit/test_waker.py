"""Wakes an event loop from other threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

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
