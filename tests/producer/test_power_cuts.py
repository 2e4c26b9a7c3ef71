"""With ``dq_buffer_sync_every`` a power cut costs fewer accepted messages than that number."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_dq.producer import segment_index
from celery_dq.producer.segment import read_header, scan
from celery_dq.producer.spill_log import SUFFIX
from celery_dq.testing.waiting import wait_until
from tests.children import in_threads
from tests.producer.forgetful_disk import ForgetfulDisk
from tests.producer.producer_harness import ProducerHarness, close_at_once, message_store, open_file, put
from tests.producer.test_failed_syncs import break_syncs


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ForgetfulDisk:
    return ForgetfulDisk(tmp_path, monkeypatch)


@pytest.fixture
def harness(tmp_path: Path, disk: ForgetfulDisk) -> Iterator[ProducerHarness]:
    harness = ProducerHarness(tmp_path / "var" / "spill")
    harness.shelf.down = True
    yield harness
    for producer in harness.made:
        producer.close(0.05)


def kept(disk: ForgetfulDisk) -> set[int]:
    """Return the numbers of the messages that a later process would find after a power cut."""
    found = set()
    for path, data in disk.survivors().items():
        if path.suffix == SUFFIX and data:
            _, start, seed = read_header(data)
            found |= {each.sequence for each in scan(data, start, seed).messages}
    return found


def test_each_accepted_message_survives_a_power_cut(
    harness: ProducerHarness, disk: ForgetfulDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_index, "SEGMENT_BYTES", 300)
    producer = harness.producer(sync_every=1)
    for number in range(30):
        put(producer, number)
        assert kept(disk) == set(range(1, number + 2))
    assert len(list(harness.folder.glob(f"*/*{SUFFIX}"))) > 3


@pytest.mark.parametrize("limit", [2, 10, 100])
def test_a_power_cut_costs_fewer_messages_than_the_number_of_a_sync(
    harness: ProducerHarness, disk: ForgetfulDisk, limit: int
) -> None:
    disk.before_sync = lambda: time.sleep(0.005)  # a disk that is slower than the calls
    producer = harness.producer(sync_every=limit)
    returned: list[int] = []
    lost: list[int] = []

    def put_all() -> None:
        for number in range(100):
            put(producer, number)
            returned.append(number)
            accepted = len(returned)
            lost.append(accepted - len(kept(disk)))

    in_threads(*[put_all] * 3)
    assert len(lost) == 300
    assert 0 < max(lost) < limit


def test_a_power_cut_after_the_interval_of_a_sync_costs_no_message(
    harness: ProducerHarness, disk: ForgetfulDisk
) -> None:
    producer = harness.producer(sync_interval_s=0.1)
    put(producer, 0, 1)
    assert kept(disk) == set()
    wait_until(lambda: kept(disk) == {1, 2}, 10)


def test_a_file_that_is_sealed_with_unsynced_messages_survives_a_power_cut(
    harness: ProducerHarness, disk: ForgetfulDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_index, "SEGMENT_BYTES", 300)
    # A sync interval so long that only sealing a file causes a sync.
    producer = harness.producer(sync_every=1000)
    put(producer, *range(30))
    files = sorted(harness.folder.glob(f"*/*{SUFFIX}"))
    assert len(files) > 3
    sealed = [scan(data, *read_header(data)[1:]).messages for data in map(Path.read_bytes, files[:-1])]
    assert kept(disk) == {each.sequence for records in sealed for each in records}


@pytest.mark.parametrize("options", [{"sync_every": 1000}, {"sync_interval_s": 600.0}])
def test_the_messages_of_a_closed_buffer_survive_a_power_cut(
    harness: ProducerHarness, disk: ForgetfulDisk, options: dict[str, Any]
) -> None:
    producer = harness.producer(**options)
    put(producer, *range(30))
    assert close_at_once(producer) == 30
    assert kept(disk) == set(range(1, 31))


def test_a_file_that_is_written_again_replaces_the_old_one_only_when_it_is_on_disk(
    harness: ProducerHarness, disk: ForgetfulDisk
) -> None:
    producer = harness.producer(sync_every=1)
    put(producer, *range(5))
    accepted = {1, 2, 3, 4, 5}
    lost: list[set[int]] = []
    disk.before_sync = lambda: lost.append(accepted - kept(disk))
    break_syncs(open_file(message_store(producer)))
    put(producer, 5)
    assert len(lost) >= 3
    assert not any(lost)
    assert kept(disk) == {*accepted, 6}
