"""The whole way from a put to a sender, with a sender that keeps what it gets and can be told to be down."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from celery_dq.producer.buffer import Limits, Message
from celery_dq.producer.buffered_producer import BufferedProducer, Persistence
from celery_dq.producer.errors import BufferFull, NotOnDisk
from celery_dq.producer.segment import read_header, scan
from celery_dq.producer.sender import Addressed, Refused, Unreachable
from celery_dq.testing.waiting import wait_until

ROOT = Path(__file__).parents[2]


class Shelf:
    """A sender that keeps messages, as a broker that knows its producers."""

    def __init__(self) -> None:
        self.down = False
        self.got: dict[str, list[bytes]] = {}
        self.batches: list[int] = []
        self.seen: dict[str, int] = {}

    def __call__(self) -> Shelf:
        return self

    def address(self, message: Any, exchange: str, routing_key: str, declare: Any) -> Addressed:
        raise NotImplementedError

    def send(self, lane: str, producer: str, messages: Sequence[Message]) -> None:
        if self.down:
            raise Unreachable("told to be down")
        if any(b"refused" in message.payload for message in messages):
            raise Refused("one of them")
        self.batches.append(len(messages))
        for message in messages:
            if message.sequence > self.seen.get(producer, 0):
                self.seen[producer] = message.sequence
                self.got.setdefault(lane, []).append(message.payload)

    def close(self) -> None: ...


class Desk:
    """Producers on one shelf, closed at the end of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shelf = Shelf()
        self.made: list[BufferedProducer] = []

    def producer(
        self, *, memory: bool = False, limits: Limits | None = None, **kept: Any
    ) -> BufferedProducer:
        persistence = Persistence(None if memory else self.folder, **kept)
        made = BufferedProducer(
            self.shelf, limits=limits or Limits(linger_s=0.001), persistence=persistence, max_block_s=0.05
        )
        self.made.append(made)
        return made


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "spill")
    yield desk
    desk.shelf.down = True
    for producer in desk.made:
        producer.close(0.05)


def put(producer: BufferedProducer, *numbers: int, lane: str = "a", size: int = 10) -> None:
    for number in numbers:
        producer.put(Addressed(lane, b"%d" % number, b"%d " % number + b"x" * size))


def arrived(desk: Desk, lane: str = "a") -> list[int]:
    return [int(payload.split()[0]) for payload in desk.shelf.got.get(lane, [])]


def outbox(producer: BufferedProducer) -> Any:
    assert producer._own is not None
    return producer._own.outbox


def test_threads_and_lanes_lose_nothing_and_keep_their_order(desk: Desk) -> None:
    producer = desk.producer(limits=Limits(batch_size=20, linger_s=0.001))
    threads = [
        threading.Thread(target=lambda lane=lane: put(producer, *range(2000), lane=lane)) for lane in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert producer.flush(20) == 0
    for lane in "abcd":
        assert arrived(desk, lane) == list(range(2000))
    assert max(desk.shelf.batches) <= 20
    assert producer.snapshot().counters["delivered"] == 8000


def test_more_than_memory_holds_goes_to_disk_and_comes_back_in_order(desk: Desk) -> None:
    producer = desk.producer(limits=Limits(batch_size=50, linger_s=0.001, max_messages=100))
    put(producer, 0)
    assert producer.flush(10) == 0
    desk.shelf.down = True
    put(producer, *range(1, 3000), size=1000)  # some three files
    seen = producer.snapshot()
    assert seen.in_memory <= 101
    assert seen.pending == 2999
    assert seen.spill_bytes > 2_900_000
    desk.shelf.down = False
    put(producer, *range(3000, 3500))
    assert producer.flush(20) == 0
    assert arrived(desk) == list(range(3500))
    put(producer, 3500)
    assert producer.flush(10) == 0
    seen = producer.snapshot()
    assert (seen.pending, seen.in_memory, seen.bytes) == (0, 0, 0)
    assert seen.spill_bytes < 200
    assert producer.close(5) == 0
    assert producer.snapshot().owners == ()


def test_the_allowance_of_the_disk_is_kept_and_room_is_waited_for(desk: Desk) -> None:
    producer = desk.producer(limits=Limits(max_messages=10), max_bytes=20_000)
    desk.shelf.down = True
    with pytest.raises(BufferFull, match="memory and spill log"):
        put(producer, *range(100), size=1000)
    accepted = producer.snapshot().pending
    assert 10 <= accepted < 25
    assert producer.snapshot().spill_bytes <= 21_000
    waiting = threading.Thread(target=lambda: put(producer, accepted))
    desk.shelf.down = False
    waiting.start()
    waiting.join(10)
    assert producer.flush(10) == 0
    assert arrived(desk) == list(range(accepted + 1))


def test_a_full_disk_degrades_to_memory_and_recovers(desk: Desk) -> None:
    producer = desk.producer(limits=Limits(max_messages=30, linger_s=0.001))
    desk.shelf.down = True
    put(producer, *range(10))
    box = outbox(producer)
    segment = next(iter(box.journal._lanes.values())).open
    kept = os.dup(segment.fd)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, segment.fd)  # from here on the kernel says: no space left on device
    os.close(full)
    box.journal.log.root = Path("/proc/nowhere")  # and a new file cannot be made either
    folder, box.journal.log._folder = box.journal.log._folder, Path("/proc/nowhere")
    put(producer, *range(10, 30))
    seen = producer.snapshot()
    assert seen.degraded
    assert seen.counters["memory_only"] == 20
    with pytest.raises(BufferFull):
        put(producer, 30)
    box.journal.log._folder, box.journal.log.root = folder, desk.folder
    os.close(kept)
    desk.shelf.down = False
    assert producer.flush(10) == 0
    put(producer, 30)
    assert producer.flush(10) == 0
    assert not producer.snapshot().degraded
    assert arrived(desk) == list(range(31))


def test_what_could_not_be_synced_is_written_anew(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    producer = desk.producer(sync_every=1)
    desk.shelf.down = True
    put(producer, *range(5))
    box = outbox(producer)
    segment = next(iter(box.journal._lanes.values())).open
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, segment.fd)  # fdatasync says EINVAL there
    os.close(null)
    put(producer, 5)
    assert "could not be synced" in caplog.text
    files = list(desk.folder.glob("*/*.seg"))
    assert len(files) == 1
    assert files[0] != segment.path
    # A later process finds all of them in it.
    data = files[0].read_bytes()
    _, start, seed = read_header(data)
    assert [record.sequence for record in scan(data, start, seed).records] == [1, 2, 3, 4, 5, 6]
    desk.shelf.down = False
    assert producer.flush(10) == 0
    assert arrived(desk) == list(range(6))


def test_a_message_that_must_be_on_disk_and_is_not_is_told(desk: Desk) -> None:
    producer = desk.producer(sync_every=1)
    desk.shelf.down = True
    put(producer, 0)
    box = outbox(producer)
    segment = next(iter(box.journal._lanes.values())).open
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, segment.fd)
    os.close(null)
    box.journal.log._folder = Path("/proc/nowhere")
    with pytest.raises(NotOnDisk, match="may be sent"):
        put(producer, 1)
    desk.shelf.down = False
    assert producer.flush(10) == 0
    assert arrived(desk) == [0, 1]


def test_one_sync_serves_many_callers(desk: Desk) -> None:
    producer = desk.producer(sync_every=1)
    threads = [
        threading.Thread(target=lambda n=n: put(producer, *range(n, n + 20))) for n in range(0, 320, 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert producer.flush(10) == 0
    assert sorted(arrived(desk)) == list(range(320))


@pytest.mark.parametrize("kept", [{"sync_every": 50}, {"sync_interval_s": 0.02}])
def test_the_disk_writes_after_a_number_or_a_time(desk: Desk, kept: dict[str, Any]) -> None:
    producer = desk.producer(**kept)
    desk.shelf.down = True
    put(producer, *range(120))
    segment = next(iter(outbox(producer).journal._lanes.values())).open
    wait_until(lambda: segment.synced > 0.3 * segment.size)


def test_a_folder_that_is_taken_away_is_made_anew(desk: Desk) -> None:
    producer = desk.producer()
    desk.shelf.down = True
    put(producer, *range(5))
    (first,) = producer.snapshot().owners
    shutil.rmtree(desk.folder / first)
    wait_until(lambda: producer.snapshot().owners not in ((), (first,)), 10)
    wait_until(lambda: len(list(desk.folder.glob("*/*.seg"))) == 1)
    desk.shelf.down = False
    assert producer.flush(10) == 0
    assert arrived(desk) == list(range(5))


def test_the_refused_one_goes_to_the_quarantine(desk: Desk) -> None:
    producer = desk.producer(limits=Limits(batch_size=10, linger_s=0.02))
    told: list[str] = []
    producer.hooks.on_error.append(lambda error, message, state: told.append(f"{message.task_id} {state}"))
    put(producer, *range(5))
    producer.put(Addressed("a", b"bad", b"refused"))
    put(producer, *range(5, 30))
    assert producer.flush(10) == 0
    assert arrived(desk) == list(range(30))
    assert told == ["bad rejected"]
    (kept,) = producer.snapshot().quarantined
    assert b"refused" in kept.read_bytes()


def test_a_destructor_may_put_in_the_middle_of_a_put(desk: Desk) -> None:
    producer = desk.producer()

    class Late:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            producer.put(Addressed("a", b"late", b"-1"))

    old = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(500):
            Late()
            put(producer, number)
    finally:
        gc.set_threshold(*old)
    gc.collect()
    assert producer.flush(10) == 0
    found = arrived(desk)
    assert [each for each in found if each >= 0] == list(range(500))
    assert found.count(-1) == 500


def test_a_fork_while_the_lock_is_held_does_not_hang_the_child(desk: Desk) -> None:
    producer = desk.producer()
    put(producer, 0)
    assert producer.flush(10) == 0
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with outbox(producer).lock:
            held.set()
            done.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)
            put(producer, 1)
            code = 0 if producer.flush(10) == 0 and arrived(desk) == [0, 1] else 2
            producer.close(2)
        finally:
            os._exit(code)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    put(producer, 2)
    assert producer.flush(10) == 0
    assert arrived(desk) == [0, 2]
    assert len(producer.snapshot().owners) == 1


def test_an_idle_producer_is_woken_by_a_message(desk: Desk) -> None:
    producer = desk.producer()
    put(producer, 0)
    wait_until(lambda: arrived(desk) == [0])
    wait_until(lambda: outbox(producer).asleep)
    put(producer, 1)
    wait_until(lambda: arrived(desk) == [0, 1], 1)


def test_closing_leaves_to_the_next_process_what_is_on_disk(desk: Desk) -> None:
    producer = desk.producer()
    desk.shelf.down = True
    put(producer, *range(10))
    assert producer.close(0.05) == 10
    desk.shelf.down = False
    later = desk.producer()
    later.start()
    outbox(later).journal.log.process = "another"  # as the folder's name tells it
    wait_until(lambda: arrived(desk) == list(range(10)))
    assert later.snapshot().counters["replayed"] == 10
    put(producer, 10)
    assert producer.flush(10) == 0


SENDER_OF_A_CHILD = """
import sys, time
from pathlib import Path
from celery_dq.producer.buffer import Limits
from celery_dq.producer.buffered_producer import BufferedProducer, Persistence
from celery_dq.producer.segment import read_header, scan
from celery_dq.producer.sender import Addressed

class Printing:
    def send(self, lane, producer, messages):
        time.sleep(0.02)
        print(*(message.payload.decode() for message in messages), flush=True)
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
def test_the_end_of_a_program_sends_what_is_left(tmp_path: Path, memory: bool) -> None:
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


def test_waiting_is_short_for_a_caller_while_the_broker_is_down(desk: Desk) -> None:
    producer = desk.producer()
    desk.shelf.down = True
    put(producer, 0)
    started = time.monotonic()
    put(producer, *range(1, 1000))
    # A bound for a hang, not a figure: see the benchmarks for those.
    assert time.monotonic() - started < 5
    wait_until(lambda: producer.snapshot().last_error == "told to be down")
