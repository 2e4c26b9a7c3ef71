"""The folder of a dead process is adopted by one process only."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest

from celery_dq.producer.buffer import BufferedMessage, Lane
from celery_dq.producer.buffered_producer import BufferedProducer
from celery_dq.producer.segment_index import SegmentIndex
from celery_dq.producer.spill_log import Orphan, SpillLog
from celery_dq.testing.waiting import wait_until
from tests.children import in_child, in_threads
from tests.producer.producer_harness import ProducerHarness, arrived, message_store, put
from tests.producer.test_spill_log import PRODUCER, WRITER, Child, log_of, orphans_of_another_process


def spill_events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The events of the spill log that were logged."""
    found = [each.__dict__.get("event") or "" for each in caplog.records]
    return [event for event in found if event.startswith("spill_")]


def test_an_adopted_folder_is_kept_at_the_next_look(tmp_path: Path) -> None:
    writer = Child(WRITER, tmp_path, 3)
    writer.line()
    writer.kill()
    # Two apps of one process, which a lock of this process does not exclude from each other.
    log, second = SpillLog(tmp_path), SpillLog(tmp_path)
    (orphan,) = log.orphans()
    # The process that adopted it searches for further folders every few seconds, while the broker is down.
    assert list(log.orphans()) == list(second.orphans()) == []
    assert orphans_of_another_process(tmp_path) == 0
    orphan.close()
    (again,) = second.orphans()
    assert list(log.orphans()) == []
    again.close()


def test_of_threads_that_meet_at_an_orphan_one_has_it(tmp_path: Path) -> None:
    for _ in range(20):
        writer = log_of(tmp_path, "dead")
        writer.create(PRODUCER, "lane").append(BufferedMessage(0, b"", b"x"))
        writer._drop_lock()
        start = threading.Barrier(4)
        found: list[Orphan] = []

        def adopt(start: threading.Barrier = start, found: list[Orphan] = found) -> None:
            log = SpillLog(tmp_path)
            start.wait(30)
            found.extend(log.orphans())

        in_threads(*[adopt] * 4)
        (orphan,) = found
        for segment in orphan.segments():
            segment.unlink()
        orphan.close()
    assert SpillLog(tmp_path).owners() == []


#: Puts messages into several lanes of a buffer whose broker is down, in many files, and waits to be killed.
PRODUCER_PROGRAM = """
import sys
from pathlib import Path
from celery_dq.producer import segment_index
from tests.producer.producer_harness import ProducerHarness, put
segment_index.SEGMENT_BYTES = 2000
harness = ProducerHarness(Path(sys.argv[1]))
harness.shelf.down = True
producer = harness.producer()
for lane in "ab":
    put(producer, *range(int(sys.argv[2])), lane=lane)
print("done", flush=True)
sys.stdin.read()
"""


def leave_messages(folder: Path, count: int) -> None:
    """Let a process put `count` messages into each of two lanes, and kill it."""
    child = Child(PRODUCER_PROGRAM, folder, count)
    assert child.line() == "done"
    child.kill()


def test_a_flush_after_a_replay_counts_and_waits_for_records_of_dead_processes(
    harness: ProducerHarness,
) -> None:
    for _ in range(2):
        leave_messages(harness.folder, 600)
    harness.shelf.down = True
    producer = harness.producer()
    producer.start()
    assert producer.flush(0) > 0
    # A flush whose time ends before its search is over counts one only.
    wait_until(lambda: producer.flush(0.3) >= 4, 30)
    harness.shelf.down = False
    put(producer, 7, lane="own")
    assert producer.flush(60) == 0
    assert [len(arrived(harness, lane)) for lane in ("a", "b", "own")] == [1200, 1200, 1]
    assert list(harness.folder.glob("*/*.seg")) == [
        message_store(producer).segment_index._lanes[own_lane(producer)].open.path
    ]
    assert producer.flush(60) == 0


def own_lane(producer: BufferedProducer) -> bytes:
    lane: Lane = message_store(producer)._lanes["own"]
    return lane.producer


def test_a_flush_after_a_replay_waits_for_a_folder_that_had_to_wait_for_another(
    harness: ProducerHarness,
) -> None:
    leave_messages(harness.folder, 50)
    (folder,) = harness.folder.iterdir()
    shutil.copytree(folder, folder.with_name("1.1.0-copy"))
    producer = harness.producer()
    producer.start()
    assert producer.flush(60) == 0
    assert list(harness.folder.iterdir()) == []
    assert arrived(harness, "a") == list(range(50))


def test_a_flush_without_a_replay_waits_for_its_own_messages_only(harness: ProducerHarness) -> None:
    harness.shelf.down = True
    producer = harness.producer()
    put(producer, 0)
    leave_messages(harness.folder, 5)
    assert producer.flush(0) == 1


def test_an_asyncio_flush_after_a_replay_waits_as_well(harness: ProducerHarness) -> None:
    leave_messages(harness.folder, 50)
    producer = harness.producer()
    producer.start()
    assert asyncio.run(producer.aflush(60)) == 0
    assert len(arrived(harness, "a")) == 50


def abandoned(root: Path) -> Path:
    """Make the folder of a dead process; return it."""
    writer = log_of(root, "dead")
    writer.create(PRODUCER, "lane").append(BufferedMessage(0, b"", b"x"))
    folder = writer.folder
    assert folder is not None
    writer._drop_lock()
    return folder


def test_a_folder_that_cannot_be_read_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = abandoned(tmp_path)
    # A directory with the name of a segment, which no user can open as a file, not even root.
    unreadable = folder / "ffffffffffffffff.seg"
    unreadable.mkdir()
    index = SegmentIndex(SpillLog(tmp_path), 1_000_000)
    for _ in range(3):
        assert index.look_for_orphans() == []
    assert spill_events(caplog) == ["spill_unreadable_began"]
    assert str(folder) in caplog.text
    unreadable.rmdir()
    ((orphan, (_,)),) = index.look_for_orphans()
    orphan.close()
    assert spill_events(caplog)[1:] == ["spill_unreadable_over"]


def test_a_forked_child_closes_the_folders_that_its_parent_has_adopted(tmp_path: Path) -> None:
    folder = abandoned(tmp_path)
    index = SegmentIndex(SpillLog(tmp_path), 1_000_000)
    ((orphan, segments),) = index.look_for_orphans()
    index.take_over(orphan, segments, lambda key, producer: Lane(key, producer, adopted=True))

    def open_below() -> list[str]:
        open_files = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
        return sorted(each for each in open_files if each.startswith(str(folder)))

    def child() -> list[str]:
        index.abandon()
        return open_below()

    segment, mine = str(folder / "0000000000000001.seg"), [str(folder), str(folder / "lock")]
    assert open_below() == sorted([*mine, segment])  # the writer has its segment open still
    assert in_child(child) == [segment]
    assert orphans_of_another_process(tmp_path) == 0  # the parent has its lock still
    index.close()


def test_a_damaged_file_that_cannot_be_quarantined_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = abandoned(tmp_path) / "ffffffffffffffff.seg"
    damaged.write_bytes(b"no segment")
    quarantine = tmp_path / "quarantine"
    quarantine.touch()  # a file with the name of the folder
    log = SpillLog(tmp_path)
    for _ in range(3):
        for orphan in log.orphans():
            assert len(orphan.segments()) == 1
            orphan.close()
    assert spill_events(caplog) == ["spill_quarantine_failed"]
    assert str(damaged) in caplog.text
    quarantine.unlink()
    for orphan in log.orphans():
        assert len(orphan.segments()) == 1
        orphan.close()
    assert spill_events(caplog)[1:] == ["spill_quarantined"]
    assert len(log.quarantined_files()) == 1
