"""Damaged files: every message that can be read is sent once, and the rest is counted, logged and kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from celery_dq.producer.buffer import Limits
from celery_dq.producer.buffered_producer import BufferedProducer
from celery_dq.producer.segment import HEAD_SIZE, read_header, scan
from tests.producer.producer_harness import ProducerHarness, arrived, close_at_once, message_store, put

COUNT = 40


class SegmentFile:
    """The bytes of an intact file, with the place of each record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray(path.read_bytes())
        _, self.start, seed = read_header(bytes(self.data))
        self.places = [self.start]
        for record in scan(bytes(self.data), self.start, seed).messages:
            self.places.append(self.places[-1] + HEAD_SIZE + len(record.id) + len(record.payload))

    def flip(self, at: int) -> None:
        self.data[at] ^= 0x10

    def flip_payload(self, number: int) -> None:
        self.flip(self.places[number] + HEAD_SIZE + 8)

    def cut(self, at: int) -> None:
        del self.data[at:]

    def zero(self, begin: int, end: int) -> None:
        self.data[begin:end] = bytes(end - begin)

    def zero_tail(self) -> None:
        self.zero(self.places[COUNT - 2] + 1, len(self.data))

    def damage(self, kinds: dict[str, Any], name: str) -> set[int]:
        """Write the damaged file; return the messages that this costs."""
        change, lost = kinds[name]
        change(self)
        self.path.write_bytes(self.data)
        found: set[int] = lost
        return found


def be_of_a_later_version(file: SegmentFile) -> None:
    file.data[4] = 9
    seed = crc32(file.data[13 : file.start], crc32(file.data[:9]))
    file.data[9:13] = seed.to_bytes(4, "little")


def two_damages(file: SegmentFile) -> None:
    file.flip_payload(7)
    file.zero_tail()


def damaged_header_and_payload(file: SegmentFile) -> None:
    file.flip(file.start - 1)
    file.flip_payload(7)


#: Name -> the damages of the file, and the messages that they cost.
DAMAGES: dict[str, tuple[Callable[[SegmentFile], Any], set[int]]] = {
    "flipped header": (lambda file: file.flip(file.start - 1), set()),
    "flipped checksum of the header": (lambda file: file.flip(10), set()),
    "flipped length of the header": (lambda file: file.flip(5), set()),
    "flipped payload": (lambda file: file.flip_payload(7), {7}),
    "flipped first record": (lambda file: file.flip_payload(0), {0}),
    "flipped length": (lambda file: file.flip(file.places[7]), {7}),
    "huge length": (lambda file: file.flip(file.places[7] + 3), {7}),
    "flipped sequence": (lambda file: file.flip(file.places[7] + 9), {7}),
    "truncated": (lambda file: file.cut(file.places[COUNT - 3] + 5), {*range(COUNT - 3, COUNT)}),
    "zeroed block": (lambda file: file.zero(file.places[5] + 3, file.places[9] + 1), {5, 6, 7, 8, 9}),
    "zeroed tail": (lambda file: file.zero_tail(), {COUNT - 2, COUNT - 1}),
    "two damages": (two_damages, {7, COUNT - 2, COUNT - 1}),
    "header and payload": (damaged_header_and_payload, {7}),
    "zeroed header": (lambda file: file.zero(0, file.start), {*range(COUNT)}),
    "later version": (be_of_a_later_version, {*range(COUNT)}),
}
#: A living process knows how long its own file was, and the header of its own file.
OWN_DAMAGES = {
    **DAMAGES,
    "lost tail": (lambda file: file.cut(file.places[COUNT - 2]), {COUNT - 2, COUNT - 1}),
    "zeroed header": (DAMAGES["zeroed header"][0], set[int]()),
    "later version": (be_of_a_later_version, set[int]()),
}
#: A reader of another process cannot know how many messages these had.
AT_LEAST_ONE = {
    *("truncated", "zeroed tail", "two damages", "flipped first record", "zeroed header", "later version")
}


def store(harness: ProducerHarness) -> tuple[BufferedProducer, SegmentFile]:
    """Put messages that are on disk only, in one file, behind two that are in memory too."""
    harness.shelf.down = True
    producer = harness.producer(limits=Limits(batch_size=1, max_messages=2, linger_s=0.001))
    put(producer, -2, -1)
    put(producer, *range(COUNT), size=30)
    (files,) = message_store(producer).segment_index._lanes.values()
    assert files.open_is_stored
    return producer, SegmentFile(files.open.path)


def check(harness: ProducerHarness, producer: BufferedProducer, file: SegmentFile, lost: set[int]) -> int:
    """Return the count of the messages that were reported as unreadable."""
    assert arrived(harness) == [-2, -1, *(each for each in range(COUNT) if each not in lost)]
    assert not file.path.exists()
    snapshot = producer.snapshot()
    assert snapshot.pending == 0
    assert len(snapshot.quarantined) == bool(lost)
    kept = b"".join(path.read_bytes() for path in snapshot.quarantined)
    for number in lost:
        begin = file.places[number]
        assert bytes(file.data[begin : file.places[number + 1]]) in kept
    counted: int = snapshot.counters["unreadable"]
    return counted


@pytest.mark.parametrize("damage", OWN_DAMAGES)
def test_a_living_process_sends_the_intact_messages_of_its_own_file(
    harness: ProducerHarness, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    producer, file = store(harness)
    lost = file.damage(OWN_DAMAGES, damage)
    harness.shelf.down = False
    assert producer.flush(30) == 0
    assert check(harness, producer, file, lost) == len(lost)
    assert events(caplog) == ["spill_damaged"] * bool(lost)


@pytest.mark.parametrize("neighbour", [False, True], ids=["replay", "neighbour"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_another_process_sends_the_intact_messages_of_a_dead_one(
    harness: ProducerHarness,
    damage: str,
    neighbour: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead, file = store(harness)
    # The files of this process, as if another one had left them.
    monkeypatch.setattr(message_store(dead).segment_index.log, "process", "1.1.0")
    close_at_once(dead)
    folder = file.path.parent
    folder = folder.rename(folder.with_name("1.1.0-dead"))
    file.path = folder / file.path.name
    lost = file.damage(DAMAGES, damage)
    harness.shelf.down = False
    producer = harness.producer()
    if neighbour:
        put(producer, 7, lane="own")
    producer.start()
    assert producer.flush(30) == 0
    counted = check(harness, producer, file, lost)
    assert counted >= 1 if damage in AT_LEAST_ONE else counted == len(lost)
    assert len(events(caplog)) == bool(lost)
    assert not folder.exists()
    assert arrived(harness, "own") == [7] * neighbour


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [each for each in caplog.records if each.levelno >= logging.ERROR]
    # Threads of other tests of the process may log, too.
    found = [each.__dict__.get("event") or "" for each in records]
    return [event for event in found if event.startswith("spill_")]
