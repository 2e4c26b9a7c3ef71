"""The flag for which a fetcher waits."""

from __future__ import annotations

import contextlib
import subprocess
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
    found = list[bool]()
    with contextlib.closing(WakeFlag()) as flag:
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


#: A signal handler in the hub waits for a flag. It prints whether it ran there, and what the wait returned.
IN_HUB = """
import signal, sys
import {library} as library
{patch}
import greenlet, os, subprocess, time
from celery_dq.native import is_in_green_hub
from celery_dq.wake_flag import WakeFlag

flag, found = WakeFlag(), []
def handle(*signal_args):
    found.append((is_in_green_hub(), flag.wait(30)))
    flag.set()
    found.append(flag.wait(30))

signal.signal(signal.SIGUSR1, handle)
subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(%d, signal.SIGUSR1)" % os.getpid()])
while not found:
    time.sleep(0.01)
print(found, is_in_green_hub())
"""


@pytest.mark.parametrize(
    ("library", "patch"),
    [("gevent", "import gevent.monkey; gevent.monkey.patch_all()"), ("eventlet", "library.monkey_patch()")],
)
def test_a_signal_handler_in_a_green_loop_does_not_wait(library: str, patch: str) -> None:
    program = IN_HUB.format(library=library, patch=patch)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert run.stdout == "[(True, False), True] False\n", run.stderr


def test_a_wait_may_be_endless() -> None:
    with contextlib.closing(WakeFlag()) as flag:
        thread = threading.Thread(target=flag.wait, args=(float("inf"),), daemon=True)
        thread.start()
        wait_until(thread.is_alive)
        flag.set()
        thread.join(30)
        assert not thread.is_alive()
