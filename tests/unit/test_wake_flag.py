"""The flag for which a fetcher waits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from celery_dq.testing.waiting import wait_until
from celery_dq.wake_flag import WakeFlag


@pytest.mark.parametrize("interrupted", ["set", "clear", "wait"])
def test_a_signal_handler_may_set_a_flag_whose_method_it_interrupts(interrupted: str) -> None:
    flag, lines = WakeFlag(), list[int]()
    calls: dict[str, Callable[[], object]] = {
        "set": flag.set,
        "clear": flag.clear,
        "wait": lambda: flag.wait(0.0),
    }

    def handle(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and len(lines) < 10:  # each makes another turn of the loop in clear()
            sys.settrace(None)
            lines.append(frame.f_lineno)
            flag.set()
            sys.settrace(handle)
        return handle

    def run() -> None:
        sys.settrace(handle)
        calls[interrupted]()
        sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(lines) > 1


def test_a_wait_ends_when_the_flag_is_set_and_resets_it() -> None:
    flag, found = WakeFlag(), list[bool]()
    thread = threading.Thread(target=lambda: found.append(flag.wait(30)))
    thread.start()
    flag.set()
    thread.join()
    assert found == [True]
    assert not flag.is_set
    assert not flag.wait(0.01)


def test_a_flag_that_is_set_twice_is_set_once() -> None:
    flag = WakeFlag()
    flag.set()
    flag.set()
    assert flag.is_set
    flag.clear()
    assert not flag.is_set


def test_a_wait_may_be_endless() -> None:
    flag = WakeFlag()
    thread = threading.Thread(target=flag.wait, args=(float("inf"),), daemon=True)
    thread.start()
    wait_until(thread.is_alive)
    flag.set()
    thread.join(30)
    assert not thread.is_alive()
