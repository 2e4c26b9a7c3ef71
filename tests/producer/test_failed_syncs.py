"""What the disk does not write, although it took it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_dq.errors import SpillFailed
from celery_dq.producer import unsynced
from celery_dq.producer.buffer import Limits
from celery_dq.producer.disk import sync_data
from celery_dq.producer.errors import NotOnDisk
from celery_dq.producer.segment import read_header, scan
from tests.producer.desk import Desk, arrived, outbox, put

#: Two of these are more than a file takes.
LARGE = 600_000


def open_file(box: Any) -> Any:
    (files,) = box.journal._lanes.values()
    return files.open


def break_syncs(segment: Any) -> Callable[[], None]:
    """Let the kernel say from now on that it cannot write the file; returns what ends that."""
    own, null = os.dup(segment.fd), os.open("/dev/null", os.O_RDWR)
    os.dup2(null, segment.fd)  # fdatasync says EINVAL there
    os.close(null)

    def mend() -> None:
        os.dup2(own, segment.fd)
        os.close(own)

    return mend


def on_disk(desk: Desk) -> list[int]:
    """The messages' numbers, in the order in which a later process finds them."""
    found = []
    for path in desk.folder.glob("*/*.seg"):
        header, start, seed = read_header(path.read_bytes())
        found.append(
            (header.number, [each.sequence for each in scan(path.read_bytes(), start, seed).records])
        )
    return [sequence for _, sequences in sorted(found) for sequence in sequences]


def deliver(desk: Desk, producer: Any, numbers: list[int]) -> None:
    """All goes to the broker, and nothing stays that would be sent again later."""
    desk.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(desk) == numbers
    producer.close(30)
    assert on_disk(desk) == []


def begin(desk: Desk, **options: Any) -> tuple[Any, Any, Any]:
    """A producer that nothing leaves, its outbox, and its file, which takes one more large message."""
    producer = desk.producer(sync_every=1, **options)
    desk.shelf.down = True
    put(producer, 0, size=LARGE)
    return producer, outbox(producer), open_file(outbox(producer))


def begin_stored(desk: Desk) -> tuple[Any, Any, Any]:
    """The same, but the message in the file is on disk only, and is not loaded."""
    producer, box, _ = begin(desk, limits=Limits(max_messages=1, linger_s=0.001))
    box.buffer.wants_loading = lambda: None
    put(producer, 1, size=LARGE)
    return producer, box, open_file(box)


def assert_written_anew(desk: Desk, segment: Any, sequences: list[int]) -> None:
    assert segment.path not in list(desk.folder.glob("*/*.seg"))
    assert on_disk(desk) == sequences


def put_unsynced(box: Any, number: int, size: int = LARGE) -> None:
    """As :func:`put`, but the caller does not wait for the disk yet."""
    assert box.put("a", b"%d" % number, b"%d " % number + b"x" * size)


def test_what_could_not_be_synced_is_written_anew(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    producer = desk.producer(sync_every=1)
    desk.shelf.down = True
    put(producer, *range(5))
    box = outbox(producer)
    segment = open_file(box)
    break_syncs(segment)
    put(producer, 5)
    assert "could not be synced" in caplog.text
    files = list(desk.folder.glob("*/*.seg"))
    assert len(files) == 1
    assert files[0] != segment.path
    # A later process finds all of them in it.
    assert on_disk(desk) == [1, 2, 3, 4, 5, 6]
    desk.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(desk) == list(range(6))


def test_a_message_that_must_be_on_disk_and_is_not_is_told(desk: Desk) -> None:
    producer = desk.producer(sync_every=1)
    desk.shelf.down = True
    put(producer, 0)
    box = outbox(producer)
    segment = open_file(box)
    break_syncs(segment)
    box.tidy = lambda: None  # or it finds, once a second, that the folder is gone, and begins a new one
    box.journal.log._folder = Path("/proc/nowhere")
    with pytest.raises(NotOnDisk, match="may be sent"):
        put(producer, 1)
    desk.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(desk) == [0, 1]


def test_what_was_written_anew_in_part_does_not_stay(desk: Desk) -> None:
    producer = desk.producer(sync_every=1)
    desk.shelf.down = True
    put(producer, *range(4), size=150_000)
    box = outbox(producer)
    segment = open_file(box)
    mend = break_syncs(segment)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))  # the third one does not fit
    try:
        for number in (4, 5):
            with pytest.raises(NotOnDisk, match="may be sent"):
                put(producer, number)
            assert list(desk.folder.glob("*/*.seg")) == [segment.path]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # The kernel tells of a failed sync once, and then says that all is well. It is not.
    mend()
    put(producer, 6)
    assert segment.path not in list(desk.folder.glob("*/*.seg"))
    desk.shelf.down = False
    assert producer.flush(30) == 0
    assert arrived(desk) == list(range(7))
    producer.close(30)
    # Nobody sends again, after the broker has forgotten it, what was delivered long ago.
    assert list(desk.folder.glob("*/*.seg")) == []


@pytest.mark.parametrize("told", ["who seals", "who syncs"])
def test_a_file_that_is_sealed_meanwhile_is_written_anew(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    producer, box, segment = begin(desk)
    put_unsynced(box, 1)
    # The kernel tells of it once: of these two descriptors one is broken.
    mend = break_syncs(segment) if told == "who syncs" else None

    def sealed_meanwhile(fd: int) -> None:
        monkeypatch.undo()
        if mend is None:
            break_syncs(segment)
        else:
            mend()
        put_unsynced(box, 2)
        assert open_file(box) is not segment
        sync_data(fd)

    monkeypatch.setattr(unsynced, "sync_data", sealed_meanwhile)
    box.sync()
    assert_written_anew(desk, segment, [1, 2, 3])
    deliver(desk, producer, [0, 1, 2])


def test_a_file_that_was_sealed_before_is_written_anew(desk: Desk) -> None:
    producer, box, segment = begin(desk)
    put_unsynced(box, 1)
    break_syncs(segment)
    put_unsynced(box, 2)
    assert open_file(box) is not segment
    # Who put 1 asks only now.
    box.sync()
    assert_written_anew(desk, segment, [1, 2, 3])
    deliver(desk, producer, [0, 1, 2])


def test_a_sealed_file_that_cannot_be_written_anew_is_told_until_it_can(desk: Desk) -> None:
    producer, box, segment = begin(desk)
    box.tidy = lambda: None  # or it finds, once a second, that the folder is gone, and begins a new one
    log = box.journal.log
    put_unsynced(box, 1)
    break_syncs(segment)
    put_unsynced(box, 2)
    folder, log._folder = log._folder, Path("/proc/nowhere")
    for number in (3, 4):
        with pytest.raises(NotOnDisk, match="may be sent"):
            put(producer, number)
    assert segment.path in list(desk.folder.glob("*/*.seg"))
    log._folder = folder
    put(producer, 5)
    assert_written_anew(desk, segment, [1, 2, 3, 4, 5, 6])
    deliver(desk, producer, [0, 1, 2, 3, 4, 5])


def test_a_sealed_file_that_was_delivered_meanwhile_is_no_trouble(desk: Desk) -> None:
    producer, box, segment = begin(desk)
    put_unsynced(box, 1)
    break_syncs(segment)
    put_unsynced(box, 2)
    deliver(desk, producer, [0, 1, 2])
    box.sync()
    assert on_disk(desk) == []


def test_a_sealed_file_of_which_nothing_is_in_memory_is_read_and_written_anew(desk: Desk) -> None:
    producer, box, segment = begin_stored(desk)
    put_unsynced(box, 2)
    break_syncs(segment)
    put_unsynced(box, 3)
    assert open_file(box) is not segment
    box.sync()
    assert_written_anew(desk, segment, [1, 2, 3, 4])
    del box.buffer.wants_loading
    deliver(desk, producer, [0, 1, 2, 3])


def test_what_cannot_be_read_back_is_told(desk: Desk) -> None:
    _, box, segment = begin_stored(desk)
    put_unsynced(box, 2)
    break_syncs(segment)
    os.truncate(segment.path, LARGE + 1000)  # what the disk lost, the kernel has not kept either
    put_unsynced(box, 3)
    with pytest.raises(SpillFailed, match="written anew"):
        box.sync()
