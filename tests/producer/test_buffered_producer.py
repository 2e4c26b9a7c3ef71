"""The whole way from a put to a sender."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from celery_dq.producer import flusher
from celery_dq.producer.buffer import Limits
from celery_dq.producer.errors import BufferFull
from celery_dq.producer.sender import Addressed
from celery_dq.testing.waiting import wait_until
from tests.producer.desk import Desk, arrived, close_at_once, outbox, put


def test_threads_and_lanes_lose_nothing_and_keep_their_order(desk: Desk) -> None:
    producer = desk.producer(limits=Limits(batch_size=20, linger_s=0.001))
    threads = [
        threading.Thread(target=lambda lane=lane: put(producer, *range(2000), lane=lane)) for lane in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert producer.flush(30) == 0
    for lane in "abcd":
        assert arrived(desk, lane) == list(range(2000))
    assert max(desk.shelf.batches) <= 20
    assert producer.snapshot().counters["delivered"] == 8000


def test_more_than_memory_holds_goes_to_disk_and_comes_back_in_order(desk: Desk) -> None:
    producer = desk.producer(limits=Limits(batch_size=50, linger_s=0.001, max_messages=100))
    put(producer, 0)
    assert producer.flush(30) == 0
    desk.shelf.down = True
    put(producer, *range(1, 3000), size=1000)  # some three files
    seen = producer.snapshot()
    assert seen.in_memory <= 101
    assert seen.pending == 2999
    assert seen.spill_bytes > 2_900_000
    desk.shelf.down = False
    put(producer, *range(3000, 3500))
    assert producer.flush(30) == 0
    assert arrived(desk) == list(range(3500))
    put(producer, 3500)
    assert producer.flush(30) == 0
    seen = producer.snapshot()
    assert (seen.pending, seen.in_memory, seen.bytes) == (0, 0, 0)
    assert seen.spill_bytes < 200
    assert producer.close(30) == 0
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
    assert producer.flush(30) == 0
    assert arrived(desk) == list(range(accepted + 1))


def test_a_full_disk_degrades_to_memory_and_recovers(desk: Desk) -> None:
    producer = desk.producer(limits=Limits(max_messages=30, linger_s=0.001))
    desk.shelf.down = True
    put(producer, *range(10))
    box = outbox(producer)
    box.tidy = lambda: None  # or it finds, once a second, that the folder is gone, and begins a new one
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
    assert producer.flush(30) == 0
    put(producer, 30)
    assert producer.flush(30) == 0
    assert not producer.snapshot().degraded
    assert arrived(desk) == list(range(31))


def test_one_sync_serves_many_callers(desk: Desk) -> None:
    producer = desk.producer(sync_every=1)
    threads = [
        threading.Thread(target=lambda n=n: put(producer, *range(n, n + 20))) for n in range(0, 320, 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert producer.flush(30) == 0
    assert sorted(arrived(desk)) == list(range(320))


@pytest.mark.parametrize("kept", [{"sync_every": 50}, {"sync_interval_s": 0.02}])
def test_the_disk_writes_after_a_number_or_a_time(desk: Desk, kept: dict[str, Any]) -> None:
    producer = desk.producer(**kept)
    desk.shelf.down = True
    put(producer, *range(120))
    segment = next(iter(outbox(producer).journal._lanes.values())).open
    wait_until(lambda: segment.synced > 0.3 * segment.size, 30)


def test_a_folder_that_is_taken_away_is_made_anew(desk: Desk) -> None:
    producer = desk.producer()
    desk.shelf.down = True
    put(producer, *range(5))
    (first,) = producer.snapshot().owners
    shutil.rmtree(desk.folder / first)
    wait_until(lambda: producer.snapshot().owners not in ((), (first,)), 30)
    wait_until(lambda: len(list(desk.folder.glob("*/*.seg"))) == 1, 30)
    desk.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(desk) == list(range(5))


def test_the_refused_one_goes_to_the_quarantine(desk: Desk) -> None:
    producer = desk.producer(limits=Limits(batch_size=10, linger_s=0.02))
    told: list[str] = []
    producer.hooks.on_error.append(lambda error, message, state: told.append(f"{message.task_id} {state}"))
    put(producer, *range(5))
    producer.put(Addressed("a", b"bad", b"refused"))
    put(producer, *range(5, 30))
    assert producer.flush(30) == 0
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
    assert producer.flush(30) == 0
    found = arrived(desk)
    assert [each for each in found if each >= 0] == list(range(500))
    assert found.count(-1) == 500


def test_a_fork_while_the_lock_is_held_does_not_hang_the_child(desk: Desk) -> None:
    producer = desk.producer()
    put(producer, 0)
    assert producer.flush(30) == 0
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
            signal.alarm(60)
            put(producer, 1)
            code = 0 if producer.flush(30) == 0 and arrived(desk) == [0, 1] else 2
            producer.close(20)
        finally:
            os._exit(code)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    put(producer, 2)
    assert producer.flush(30) == 0
    assert arrived(desk) == [0, 2]
    assert len(producer.snapshot().owners) == 1


def test_an_idle_producer_is_woken_by_a_message(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "ADOPT_S", 3600.0)  # when it would look by itself
    producer = desk.producer()
    put(producer, 0)
    wait_until(lambda: arrived(desk) == [0])
    wait_until(lambda: outbox(producer).asleep)
    put(producer, 1)
    wait_until(lambda: arrived(desk) == [0, 1], 30)


def test_closing_leaves_to_the_next_process_what_is_on_disk(desk: Desk) -> None:
    producer = desk.producer()
    desk.shelf.down = True
    put(producer, *range(10))
    assert close_at_once(producer) == 10
    desk.shelf.down = False
    later = desk.producer()
    later.start()
    outbox(later).journal.log.process = "another"  # as the folder's name tells it
    wait_until(lambda: arrived(desk) == list(range(10)), 30)
    assert later.snapshot().counters["replayed"] == 10
    put(producer, 10)
    assert producer.flush(30) == 0


def test_waiting_is_short_for_a_caller_while_the_broker_is_down(desk: Desk) -> None:
    producer = desk.producer()
    desk.shelf.down = True
    put(producer, 0)
    started = time.monotonic()
    put(producer, *range(1, 1000))
    # A bound for a hang, not a figure: see the benchmarks for those.
    assert time.monotonic() - started < 5
    wait_until(lambda: producer.snapshot().last_error == "told to be down", 30)


@pytest.mark.parametrize("memory", [True, False])
def test_a_put_that_meets_a_close_is_not_lost(desk: Desk, memory: bool) -> None:
    producer = desk.producer(memory=memory)
    put(producer, 0)
    found = outbox(producer)
    really = found.put

    def preempted(*message: Any) -> bool:
        # Another thread closes the buffer between the look at it and the put.
        producer.close(30)
        return bool(really(*message))

    found.put = preempted
    put(producer, 1)
    assert producer.flush(30) == 0
    assert arrived(desk) == [0, 1]


def test_who_waits_for_room_while_the_buffer_is_closed_gets_it_in_the_next(desk: Desk) -> None:
    producer = desk.producer(memory=True, limits=Limits(max_messages=1))
    desk.shelf.down = True
    put(producer, 0)
    found = outbox(producer)
    ring, failed = found.ring, []
    producer.hooks.on_error.append(lambda error, message, state: failed.append(int(message.task_id)))

    def closed_meanwhile() -> None:
        found.ring = ring
        close_at_once(producer)
        desk.shelf.down = False

    found.ring = closed_meanwhile
    put(producer, 1)
    assert producer.flush(30) == 0
    assert failed == [0]
    assert arrived(desk) == [1]
