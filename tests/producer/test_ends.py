"""The end of programs that have put messages, and greenlets that put messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


SENDER_OF_A_CHILD = """
import sys, time
from pathlib import Path
from celery_dq.producer.buffer import Limits
from celery_dq.producer.buffered_producer import BufferedProducer, Persistence
from celery_dq.producer.segment import read_header, scan
from celery_dq.producer.sender import Addressed

def before_sending(): ...

class Printing:
    def send(self, lane, producer, messages):
        before_sending()
        print(*(message.payload.decode() for message in messages), flush=True)
        return ()
    def close(self): ...

producer = BufferedProducer(Printing, limits=Limits(linger_s=LINGER), persistence=Persistence(FOLDER))
"""


def run(program: str, folder: Path | None, *, linger: float = 60.0, first: str = "") -> str:
    head = SENDER_OF_A_CHILD.replace("LINGER", str(linger)).replace(
        "FOLDER", "None" if folder is None else f"Path({str(folder)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", first + head + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("memory", [False, True])
def test_the_end_of_a_program_sends_the_rest(tmp_path: Path, memory: bool) -> None:
    program = "for n in range(5): producer.put(Addressed('a', b'', b'%d' % n))\n"
    assert run(program, None if memory else tmp_path).split() == list("01234")


def test_the_end_of_a_multiprocessing_child_does_too(tmp_path: Path) -> None:
    program = (
        "import multiprocessing\n"
        "def work():\n"
        "    for n in range(5): producer.put(Addressed('a', b'', b'%d' % n))\n"
        "child = multiprocessing.get_context('fork').Process(target=work); child.start(); child.join()\n"
    )
    assert run(program, tmp_path).split() == list("01234")


def test_the_end_of_a_program_waits_for_no_sync_interval(tmp_path: Path) -> None:
    program = (
        f"kept = Persistence(Path({str(tmp_path)!r}), sync_interval_s=600)\n"
        "producer = BufferedProducer(Printing, persistence=kept)\n"
        "producer.put(Addressed('a', b'', b'0'))\n"
    )
    assert run(program, tmp_path) == "0\n"


@pytest.mark.parametrize("patch", ["gevent.monkey.patch_all", "eventlet.monkey_patch"])
def test_greenlets_put_and_flush_while_others_go_on(tmp_path: Path, patch: str) -> None:
    program = (
        f"kept = Persistence(Path({str(tmp_path)!r}), sync_every=1)\n"
        "producer = BufferedProducer(Printing, persistence=kept)\n"
        "import threading\n"
        "ticks = []\n"
        "def tick():\n"
        "    while not over: ticks.append(1); time.sleep(0.001)\n"
        "over = False\n"
        # The flusher is blocked until other threads have run. If they were blocked too, it would time out.
        "def before_sending():\n"
        "    deadline = time.monotonic() + 20\n"
        "    while len(ticks) < 4 and time.monotonic() < deadline: pass\n"
        "ticker = threading.Thread(target=tick); ticker.start()\n"
        "def work(lane):\n"
        "    for n in range(20): producer.put(Addressed(lane, b'', f'{lane}{n}'.encode()))\n"
        "workers = [threading.Thread(target=work, args=(lane,)) for lane in 'abc']\n"
        "[each.start() for each in workers]; [each.join() for each in workers]\n"
        "left = producer.flush(10)\n"
        "over = True; ticker.join()\n"
        "print('left', left, 'ticks', len(ticks) > 3)\n"
    )
    printed = run(program, tmp_path, first=f"import {patch.rpartition('.')[0]}; {patch}()\n").split()
    assert printed[-4:] == ["left", "0", "ticks", "True"]
    for lane in "abc":
        assert [each for each in printed[:-4] if each[0] == lane] == [f"{lane}{n}" for n in range(20)]
