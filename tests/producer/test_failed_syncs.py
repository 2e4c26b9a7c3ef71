"""Files of the spill log whose sync fails."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Any

import pytest

from celery_dq.errors import SpillFailed
from celery_dq.producer import spill_log
from celery_dq.producer.buffer import Limits
from celery_dq.producer.segment import read_header, scan
from celery_dq.producer.sender import NotOnDisk
from celery_dq.producer.spill_log import sync_data
from tests.producer.producer_harness import (
    ProducerHarness,
    arrived,
    message_store,
    open_file,
    put,
    refuse_new_files,
)

#: Size of a message of which two do not fit into a file.
LARGE = 600_000


def break_syncs(segment: Any) -> Callable[[], None]:
    """Let each sync of a file fail from now on; return a function that ends this."""
    own, null = os.dup(segment.fd), os.open("/dev/null", os.O_RDWR)
    os.dup2(null, segment.fd)  # fdatasync fails there with EINVAL
    os.close(null)

    def mend() -> None:
        os.dup2(own, segment.fd)
        os.close(own)

    return mend


def on_disk(harness: ProducerHarness) -> list[int]:
    """Return the numbers of the messages in the order in which a later process finds them."""
    found = []
    for path in harness.folder.glob("*/*.seg"):
        header, start, seed = read_header(path.read_bytes())
        found.append(
            (header.number, [each.sequence for each in scan(path.read_bytes(), start, seed).messages])
        )
    return [sequence for _, sequences in sorted(found) for sequence in sequences]


def deliver(harness: ProducerHarness, producer: Any, numbers: list[int]) -> None:
    """Check that all messages are delivered, and that no file is left that would be sent again."""
    harness.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(harness) == numbers
    producer.close(30)
    assert on_disk(harness) == []


def begin(harness: ProducerHarness, **options: Any) -> tuple[Any, Any, Any]:
    """Make a producer whose broker is down, its message store, and its file with room for a large message."""
    producer = harness.producer(sync_every=1, **options)
    harness.shelf.down = True
    put(producer, 0, size=LARGE)
    return producer, message_store(producer), open_file(message_store(producer))


def begin_sealed(harness: ProducerHarness) -> tuple[Any, Any, Any]:
    """Do the same, and seal the file with an unsynced message, whose sync will fail."""
    producer, box, segment = begin(harness)
    put_unsynced(box, 1)
    break_syncs(segment)
    put_unsynced(box, 2)
    assert open_file(box) is not segment
    return producer, box, segment


def begin_stored(harness: ProducerHarness) -> tuple[Any, Any, Any]:
    """Do the same, but with a message that is on disk only and not loaded."""
    producer, box, _ = begin(harness, limits=Limits(max_messages=1, linger_s=0.001))
    box.buffer.wants_loading = lambda: None
    put(producer, 1, size=LARGE)
    return producer, box, open_file(box)


def assert_written_again(harness: ProducerHarness, segment: Any, sequences: list[int]) -> None:
    assert segment.path not in list(harness.folder.glob("*/*.seg"))
    assert on_disk(harness) == sequences


def put_unsynced(box: Any, number: int, size: int = LARGE) -> None:
    """Put messages as :func:`put`, but without waiting for the disk."""
    assert box.put("a", b"%d" % number, b"%d " % number + b"x" * size)


def test_an_unsynced_segment_is_written_again(
    harness: ProducerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    producer = harness.producer(sync_every=1)
    harness.shelf.down = True
    put(producer, *range(5))
    box = message_store(producer)
    segment = open_file(box)
    break_syncs(segment)
    put(producer, 5)
    assert "could not be synced" in caplog.text
    files = list(harness.folder.glob("*/*.seg"))
    assert len(files) == 1
    assert files[0] != segment.path
    # A later process finds all messages in it.
    assert on_disk(harness) == [1, 2, 3, 4, 5, 6]
    harness.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(harness) == list(range(6))


def test_a_message_that_must_be_on_disk_and_is_not_is_reported(harness: ProducerHarness) -> None:
    producer = harness.producer(sync_every=1)
    harness.shelf.down = True
    put(producer, 0)
    box = message_store(producer)
    segment = open_file(box)
    break_syncs(segment)
    refuse_new_files(box)
    with pytest.raises(NotOnDisk, match="may be sent"):
        put(producer, 1)
    harness.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(harness) == [0, 1]


def test_a_segment_that_was_rewritten_in_part_does_not_stay(harness: ProducerHarness) -> None:
    producer = harness.producer(sync_every=1)
    harness.shelf.down = True
    put(producer, *range(4), size=150_000)
    box = message_store(producer)
    segment = open_file(box)
    mend = break_syncs(segment)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))  # the third message does not fit
    try:
        for number in (4, 5):
            with pytest.raises(NotOnDisk, match="may be sent"):
                put(producer, number)
            assert list(harness.folder.glob("*/*.seg")) == [segment.path]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # The kernel reports a failed sync once. Later syncs succeed, although data is lost.
    mend()
    put(producer, 6)
    assert segment.path not in list(harness.folder.glob("*/*.seg"))
    harness.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(harness) == list(range(7))
    producer.close(30)
    # A message that was delivered long ago is not sent again, after the broker has forgotten its sequence.
    assert list(harness.folder.glob("*/*.seg")) == []


@pytest.mark.parametrize("reported", ["who seals", "who syncs"])
def test_a_file_that_is_sealed_meanwhile_is_written_again(
    harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch, reported: str
) -> None:
    producer, box, segment = begin(harness)
    put_unsynced(box, 1)
    # The kernel reports the failure once, so only one of these two descriptors is broken.
    mend = break_syncs(segment) if reported == "who syncs" else None

    def sealed_meanwhile(fd: int) -> None:
        monkeypatch.undo()
        if mend is None:
            break_syncs(segment)
        else:
            mend()
        put_unsynced(box, 2)
        assert open_file(box) is not segment
        sync_data(fd)

    monkeypatch.setattr(spill_log, "sync_data", sealed_meanwhile)
    box.sync()
    assert_written_again(harness, segment, [1, 2, 3])
    deliver(harness, producer, [0, 1, 2])


def test_a_file_that_was_sealed_before_is_written_again(harness: ProducerHarness) -> None:
    producer, box, segment = begin_sealed(harness)
    # The caller that put message 1 asks only now.
    box.sync()
    assert_written_again(harness, segment, [1, 2, 3])
    deliver(harness, producer, [0, 1, 2])


def test_a_sealed_file_that_cannot_be_rewritten_is_reported_until_it_can(harness: ProducerHarness) -> None:
    producer, box, segment = begin_sealed(harness)
    allow_new_files = refuse_new_files(box)
    for number in (3, 4):
        with pytest.raises(NotOnDisk, match="may be sent"):
            put(producer, number)
    assert segment.path in list(harness.folder.glob("*/*.seg"))
    allow_new_files()
    put(producer, 5)
    assert_written_again(harness, segment, [1, 2, 3, 4, 5, 6])
    deliver(harness, producer, [0, 1, 2, 3, 4, 5])


def test_a_sealed_file_that_was_delivered_meanwhile_is_no_trouble(harness: ProducerHarness) -> None:
    producer, box, _ = begin_sealed(harness)
    deliver(harness, producer, [0, 1, 2])
    box.sync()
    assert on_disk(harness) == []


def test_a_sealed_file_of_which_nothing_is_in_memory_is_read_and_written_again(
    harness: ProducerHarness,
) -> None:
    producer, box, segment = begin_stored(harness)
    put_unsynced(box, 2)
    break_syncs(segment)
    put_unsynced(box, 3)
    assert open_file(box) is not segment
    box.sync()
    assert_written_again(harness, segment, [1, 2, 3, 4])
    del box.buffer.wants_loading
    deliver(harness, producer, [0, 1, 2, 3])


def test_a_segment_that_cannot_be_read_back_is_reported(harness: ProducerHarness) -> None:
    _, box, segment = begin_stored(harness)
    put_unsynced(box, 2)
    break_syncs(segment)
    os.truncate(segment.path, LARGE + 1000)  # the page cache has lost the data too
    put_unsynced(box, 3)
    with pytest.raises(SpillFailed, match="could not be written to a new file"):
        box.sync()


def test_a_damaged_file_that_cannot_be_quarantined_stays_in_its_folder(harness: ProducerHarness) -> None:
    producer, box, segment = begin_stored(harness)
    put_unsynced(box, 2)
    (harness.folder / "quarantine").touch()  # a file with the name of the folder
    segment.path.write_bytes(b"no segment")
    del box.buffer.wants_loading
    harness.shelf.down = False
    assert producer.flush(30) == 0
    producer.close(30)
    assert arrived(harness) == [0]
    assert segment.path.read_bytes() == b"no segment"
