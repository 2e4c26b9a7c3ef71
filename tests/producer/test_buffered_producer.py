"""The path of a message from a put to a sender."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from celery_dq.errors import ConfigurationError
from celery_dq.producer import flusher
from celery_dq.producer.buffer import BufferedMessage, Limits
from celery_dq.producer.sender import (
    Addressed,
    BrokerUnreachable,
    BufferFull,
    NotOnDisk,
    PublishDeferred,
    Refusal,
)
from celery_dq.producer.spill_log import SpillLog
from celery_dq.testing.waiting import wait_until
from tests.children import in_child, in_threads
from tests.producer.producer_harness import (
    ProducerHarness,
    arrived,
    close_at_once,
    message_store,
    open_file,
    put,
    refuse_new_files,
)


def test_threads_and_lanes_lose_nothing_and_keep_their_order(harness: ProducerHarness) -> None:
    producer = harness.producer(limits=Limits(batch_size=20, linger_s=0.001))
    in_threads(*(partial(put, producer, *range(2000), lane=lane) for lane in "abcd"))
    assert producer.flush(30) == 0
    for lane in "abcd":
        assert arrived(harness, lane) == list(range(2000))
    assert max(harness.shelf.batches) <= 20
    assert producer.snapshot().counters["delivered"] == 8000


def test_more_than_memory_holds_goes_to_disk_and_comes_back_in_order(harness: ProducerHarness) -> None:
    producer = harness.producer(limits=Limits(batch_size=50, linger_s=0.001, max_messages=100))
    put(producer, 0)
    assert producer.flush(30) == 0
    harness.shelf.down = True
    put(producer, *range(1, 3000), size=1000)  # some three files
    seen = producer.snapshot()
    assert seen.in_memory <= 101
    assert seen.pending == 2999
    assert seen.spill_bytes > 2_900_000
    harness.shelf.down = False
    put(producer, *range(3000, 3500))
    assert producer.flush(30) == 0
    assert arrived(harness) == list(range(3500))
    put(producer, 3500)
    assert producer.flush(30) == 0
    seen = producer.snapshot()
    assert (seen.pending, seen.in_memory, seen.bytes) == (0, 0, 0)
    assert seen.spill_bytes < 200
    assert producer.close(30) == 0
    assert producer.snapshot().owners == ()


def test_the_allowance_of_the_disk_is_kept_and_room_is_waited_for(harness: ProducerHarness) -> None:
    producer = harness.producer(limits=Limits(max_messages=10), max_bytes=20_000)
    harness.shelf.down = True
    with pytest.raises(BufferFull, match="memory and spill log"):
        put(producer, *range(100), size=1000)
    accepted = producer.snapshot().pending
    assert 10 <= accepted < 25
    assert producer.snapshot().spill_bytes <= 21_000
    waiting = threading.Thread(target=lambda: put(producer, accepted))
    harness.shelf.down = False
    waiting.start()
    waiting.join(30)
    assert producer.flush(30) == 0
    assert arrived(harness) == list(range(accepted + 1))


def test_a_full_disk_degrades_to_memory_and_recovers(harness: ProducerHarness) -> None:
    producer = harness.producer(limits=Limits(max_messages=30, linger_s=0.001))
    harness.shelf.down = True
    put(producer, *range(10))
    box = message_store(producer)
    segment = open_file(box)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, segment.fd)  # from now on a write fails with "no space left on device"
    os.close(full)
    allow_new_files = refuse_new_files(box)
    put(producer, *range(10, 30))
    seen = producer.snapshot()
    assert seen.degraded
    assert seen.counters["memory_only"] == 20
    with pytest.raises(BufferFull):
        put(producer, 30)
    allow_new_files()
    harness.shelf.down = False
    assert producer.flush(30) == 0
    put(producer, 30)
    assert producer.flush(30) == 0
    assert not producer.snapshot().degraded
    assert arrived(harness) == list(range(31))


@pytest.mark.parametrize("limit", [1, 3])
def test_a_full_disk_is_an_error_of_the_calls_that_the_disk_must_have(
    harness: ProducerHarness, limit: int
) -> None:
    producer = harness.producer(sync_every=limit)
    harness.shelf.down = True
    for number in range(6):
        put(producer, number)
    box = message_store(producer)
    wait_until(lambda: box.counters.accepted - box.synced < 2, 30)
    open_file(box).torn = True
    allow_new_files = refuse_new_files(box)
    refusals = []
    for number in range(6, 12):
        try:
            put(producer, number)
        except NotOnDisk as error:
            refusals.append(str(error))
    assert len(refusals) > 6 - limit
    assert all("in memory only" in text for text in refusals)
    allow_new_files()
    harness.shelf.down = False
    assert producer.flush(30) == 0
    put(producer, 12)
    assert producer.flush(30) == 0
    assert arrived(harness) == list(range(13))


@pytest.mark.parametrize(
    "kept", [{"sync_every": 50}, {"sync_interval_s": 0.02}, {"sync_every": 200, "sync_interval_s": 600.0}]
)
def test_the_disk_writes_after_a_number_or_a_time(harness: ProducerHarness, kept: dict[str, Any]) -> None:
    producer = harness.producer(**kept)
    harness.shelf.down = True
    put(producer, *range(120))
    segment = open_file(message_store(producer))
    wait_until(lambda: segment.synced > 0.3 * segment.size, 30)


def test_a_folder_that_is_taken_away_is_made_again(harness: ProducerHarness) -> None:
    producer = harness.producer()
    harness.shelf.down = True
    put(producer, *range(5))
    (first,) = producer.snapshot().owners
    shutil.rmtree(harness.folder / first)
    wait_until(lambda: producer.snapshot().owners not in ((), (first,)), 30)
    wait_until(lambda: len(list(harness.folder.glob("*/*.seg"))) == 1, 30)
    harness.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(harness) == list(range(5))


def test_the_refused_one_goes_to_the_quarantine(harness: ProducerHarness) -> None:
    producer = harness.producer(limits=Limits(batch_size=10, linger_s=0.02))
    reported: list[str] = []
    producer.hooks.on_error.append(
        lambda error, message, state: reported.append(f"{message.task_id} {state}")
    )
    put(producer, *range(5))
    producer.put(Addressed("a", b"bad", b"refused"))
    put(producer, *range(5, 30))
    assert producer.flush(30) == 0
    assert arrived(harness) == list(range(30))
    assert reported == ["bad rejected"]
    (kept,) = producer.snapshot().quarantined
    assert b"refused" in kept.read_bytes()


def test_a_refused_message_waits_until_the_quarantine_can_be_written(harness: ProducerHarness) -> None:
    producer = harness.producer()
    put(producer, 0)
    (harness.folder / "quarantine").touch()  # a file with the name of the folder
    producer.put(Addressed("a", b"bad", b"refused"))
    put(producer, 1)
    wait_until(lambda: "quarantine" in producer.snapshot().last_error, 30)
    put(producer, 2, lane="b")
    wait_until(lambda: arrived(harness, "b") == [2], 30)
    assert arrived(harness) == [0]
    (harness.folder / "quarantine").unlink()
    assert producer.flush(30) == 0
    assert arrived(harness) == [0, 1]
    (kept,) = producer.snapshot().quarantined
    assert b"refused" in kept.read_bytes()


def test_a_destructor_may_put_in_the_middle_of_a_put(harness: ProducerHarness) -> None:
    producer = harness.producer()

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
    found = arrived(harness)
    assert [each for each in found if each >= 0] == list(range(500))
    assert found.count(-1) == 500


def test_a_fork_while_the_lock_is_held_does_not_hang_the_child(harness: ProducerHarness) -> None:
    producer = harness.producer()
    put(producer, 0)
    assert producer.flush(30) == 0
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with message_store(producer).lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)

    def child() -> list[int]:
        put(producer, 1)
        assert producer.flush(30) == 0
        producer.close(20)
        return arrived(harness)

    assert in_child(child) == [0, 1]
    done.set()
    holder.join()
    put(producer, 2)
    assert producer.flush(30) == 0
    assert arrived(harness) == [0, 2]
    assert len(producer.snapshot().owners) == 1


def test_an_idle_producer_is_woken_by_a_message(
    harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "ADOPT_S", 3600.0)  # no search without a request
    producer = harness.producer()
    put(producer, 0)
    wait_until(lambda: arrived(harness) == [0])
    wait_until(lambda: message_store(producer).asleep)
    put(producer, 1)
    wait_until(lambda: arrived(harness) == [0, 1], 30)


def test_a_producer_whose_lane_waits_is_woken_by_a_message_for_another(
    harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ADOPT_S", "FIRST_DELAY_S", "LAST_DELAY_S"):
        monkeypatch.setattr(flusher, name, 3600.0)
    send = harness.shelf.send

    def refusing(lane: str, *rest: Any) -> Sequence[Refusal]:
        if lane == "full":
            raise PublishDeferred("the queue is full")
        return send(lane, *rest)

    monkeypatch.setattr(harness.shelf, "send", refusing)
    producer = harness.producer()
    put(producer, 0, lane="full")
    wait_until(lambda: message_store(producer).asleep, 30)
    put(producer, 1)
    wait_until(lambda: arrived(harness) == [1], 30)


def test_a_full_batch_does_not_linger(harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "ADOPT_S", 3600.0)
    producer = harness.producer(limits=Limits(batch_size=5, linger_s=3600))
    put(producer, *range(5))
    wait_until(lambda: arrived(harness) == [*range(5)], 30)


def test_closing_leaves_the_messages_on_disk_to_the_next_process(harness: ProducerHarness) -> None:
    producer = harness.producer()
    harness.shelf.down = True
    put(producer, *range(10))
    assert close_at_once(producer) == 10
    harness.shelf.down = False
    later = harness.producer()
    later.start()
    message_store(later).segment_index.log.process = "another"  # the name in the name of the folder
    wait_until(lambda: arrived(harness) == list(range(10)), 30)
    assert later.snapshot().counters["replayed"] == 10
    put(producer, 10)
    assert producer.flush(30) == 0


def test_waiting_is_short_for_a_caller_while_the_broker_is_down(harness: ProducerHarness) -> None:
    producer = harness.producer()
    harness.shelf.down = True
    put(producer, 0)
    started = time.monotonic()
    put(producer, *range(1, 1000))
    # A bound against a hang, not a measurement; the benchmarks measure.
    assert time.monotonic() - started < 5
    wait_until(lambda: producer.snapshot().last_error == "set to be down", 30)


@pytest.mark.parametrize("memory", [True, False])
def test_a_put_that_meets_a_close_is_not_lost(harness: ProducerHarness, memory: bool) -> None:
    producer = harness.producer(memory=memory)
    put(producer, 0)
    found = message_store(producer)
    really = found.put

    def preempted(*message: Any) -> bool:
        # Another thread closes the buffer between the check and the put.
        producer.close(30)
        return bool(really(*message))

    found.put = preempted
    put(producer, 1)
    assert producer.flush(30) == 0
    assert arrived(harness) == [0, 1]


def test_a_call_that_waits_for_room_at_the_close_gets_it_in_the_next_buffer(harness: ProducerHarness) -> None:
    producer = harness.producer(memory=True, limits=Limits(max_messages=1))
    harness.shelf.down = True
    put(producer, 0)
    found = message_store(producer)
    wake, failed = found.wake, []
    producer.hooks.on_error.append(lambda error, message, state: failed.append(int(message.task_id)))

    def closed_meanwhile() -> None:
        found.wake = wake
        close_at_once(producer)
        harness.shelf.down = False

    found.wake = closed_meanwhile
    put(producer, 1)
    assert producer.flush(30) == 0
    assert failed == [0]
    assert arrived(harness) == [1]


def test_a_folder_that_cannot_be_used_is_an_error_of_the_first_call(harness: ProducerHarness) -> None:
    harness.folder.write_text("a file is in the way")
    producer = harness.producer()
    cannot = "dq_buffer_folder: .*spill cannot be used.*memory only"
    with pytest.raises(ConfigurationError, match=cannot):
        put(producer, 0)
    with pytest.raises(ConfigurationError, match=cannot):
        producer.start()
    harness.folder.unlink()
    harness.folder.mkdir()
    harness.folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="other users may write"):
        put(producer, 0)
    assert (arrived(harness), list(harness.folder.iterdir())) == ([], [])
    harness.folder.chmod(0o700)
    put(producer, 0)
    assert producer.flush(30) == 0
    assert arrived(harness) == [0]


def test_a_disk_that_is_full_from_the_beginning_degrades_to_memory(
    harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(log: SpillLog) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(log.root))

    monkeypatch.setattr(SpillLog, "_open_root", full)
    producer = harness.producer()
    put(producer, 0)
    assert producer.snapshot().degraded
    assert producer.flush(30) == 0
    assert arrived(harness) == [0]


def test_the_bytes_of_other_processes_count_against_the_limit(harness: ProducerHarness) -> None:
    other = SpillLog(harness.folder)
    other.process = "1.1.0"  # the name in the name of its folder; the process lives, and holds its lock
    other.create(b"p" * 16, "lane").append(BufferedMessage(1, b"", b"x" * 15_000))
    producer = harness.producer(limits=Limits(max_messages=5, linger_s=0.001), max_bytes=20_000)
    harness.shelf.down = True
    producer.start()
    wait_until(lambda: message_store(producer).segment_index.others_bytes >= 15_000, 30)
    with pytest.raises(BufferFull):
        put(producer, *range(1000))
    seen = producer.snapshot()
    assert 0 < seen.spill_bytes <= 5_000
    assert seen.degraded


def test_a_sender_that_raises_something_unexpected_once_loses_nothing(
    harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer = harness.producer(limits=Limits(batch_size=2, linger_s=0.001))
    send, errors = harness.shelf.send, [ZeroDivisionError("a surprise")]

    def surprising(lane: str, *rest: Any) -> Sequence[Refusal]:
        if lane == "a" and errors:
            raise errors.pop()
        return send(lane, *rest)

    monkeypatch.setattr(harness.shelf, "send", surprising)
    reported: list[Any] = []
    producer.hooks.on_error.append(lambda *each: reported.append(each))
    for lane in "ab":
        put(producer, *range(7), lane=lane)
    assert producer.flush(30) == 0
    assert arrived(harness, "a") == arrived(harness, "b") == list(range(7))
    assert (errors, reported) == ([], [])
    assert producer.snapshot().counters["retries"] == 1
    assert "A batch of lane a was not accepted" in caplog.text
    assert "ZeroDivisionError: a surprise" in caplog.text
    assert "continues after an error" not in caplog.text


def test_of_a_batch_that_broke_off_only_the_rest_is_sent_again(
    harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = harness.producer(limits=Limits(batch_size=5, linger_s=60))
    send, sent, breaks = harness.shelf.send, list[int](), [2]

    def breaking(lane: str, process: str, messages: Sequence[BufferedMessage]) -> Sequence[Refusal]:
        count = breaks.pop() if breaks else len(messages)
        sent.extend(int(message.payload.split()[0]) for message in messages[:count])
        send(lane, process, messages[:count])
        if count < len(messages):
            raise BrokerUnreachable("the connection is gone", sent=count)
        return ()

    monkeypatch.setattr(harness.shelf, "send", breaking)
    reported: list[str] = []
    producer.hooks.on_delivered.append(reported.extend)
    put(producer, *range(20))
    assert producer.flush(30) == 0
    assert not breaks
    # Other messages would be delivered twice, because not all brokers recognise a resent message.
    assert sent == [int(each) for each in reported] == list(range(20))
