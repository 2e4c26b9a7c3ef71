from __future__ import annotations

import random
from bisect import bisect_right
from itertools import accumulate
from zlib import crc32

import pytest
from hypothesis import given, settings, strategies as st

from celery_dq.errors import CorruptSegment
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.segment import (
    HEAD_SIZE,
    MAX_LANE,
    FileHeader,
    pack_header,
    pack_record,
    read_header,
    scan,
)

PRODUCER = bytes(range(16))


def build(records: list[BufferedMessage], lane: str = '["p","push",0]', number: int = 3) -> bytes:
    head, seed = pack_header(FileHeader(PRODUCER, number, lane))
    return head + b"".join(pack_record(record, seed) for record in records)


def size_of(record: BufferedMessage) -> int:
    return HEAD_SIZE + len(record.id) + len(record.payload)


def recovered(data: bytes) -> list[BufferedMessage]:
    try:
        _, start, seed = read_header(data)
    except CorruptSegment:
        return []
    return scan(data, start, seed).messages


def some_records(count: int, seed: int = 7) -> list[BufferedMessage]:
    chance = random.Random(seed)
    sequences = sorted(chance.sample(range(1, 1 << 40), count))
    return [
        BufferedMessage(each, chance.randbytes(chance.randrange(40)), chance.randbytes(chance.randrange(60)))
        for each in sequences
    ]


@given(
    st.text(max_size=40),
    st.integers(0, 2**64 - 1),
    st.lists(st.tuples(st.binary(max_size=255), st.binary(max_size=50)), max_size=20),
)
@settings(deadline=None)
def test_written_records_are_read(lane: str, number: int, parts: list[tuple[bytes, bytes]]) -> None:
    records = [BufferedMessage(sequence, *part) for sequence, part in enumerate(parts)]
    data = build(records, lane, number)
    header, start, seed = read_header(data)
    assert header == FileHeader(PRODUCER, number, lane)
    assert scan(data, start, seed) == (records, b"", "", 0)


def test_a_cut_at_every_byte_leaves_the_whole_records_before_it() -> None:
    records = some_records(25)
    data = build(records)
    ends = []
    _, at, _ = read_header(data)
    for record in records:
        at += size_of(record)
        ends.append(at)
    for cut in range(len(data)):
        assert recovered(data[:cut]) == records[: sum(end <= cut for end in ends)]


def test_flipped_bits_cost_only_the_records_that_they_hit() -> None:
    """After 10⁵ random flips, one to three at a time, a reader gets all other records, and no wrong one."""
    chance = random.Random(20)
    flips = 0
    while flips < 100_000:
        records = some_records(chance.randrange(1, 6), seed=flips)
        data = bytearray(build(records))
        _, start, _ = read_header(bytes(data))
        ends = list(accumulate(map(size_of, records), initial=start))
        for _ in range(40):
            first = start * 8 if chance.random() < 0.998 else 0  # to restore a header takes 0.1 s
            places = {chance.randrange(first, len(data) * 8) for _ in range(chance.choice((1, 1, 1, 2, 3)))}
            for place in places:
                data[place // 8] ^= 1 << place % 8
            read = recovered(bytes(data))
            hit = {bisect_right(ends, place // 8) - 1 for place in places if place // 8 >= start}
            # A header with one damaged byte is restored.
            header_is_lost = len({place // 8 for place in places if place // 8 < start}) > 1
            intact = [each for number, each in enumerate(records) if number not in hit]
            assert read == ([] if header_is_lost else intact)
            for place in places:
                data[place // 8] ^= 1 << place % 8
            flips += len(places)


def test_a_block_of_another_segment_is_not_believed() -> None:
    records = some_records(6)
    mine, other = build(records, number=3), build(records, number=4)
    assert len(mine) == len(other)
    _, start, _ = read_header(mine)
    assert recovered(mine[:start] + other[start:]) == []


def test_zeros_behind_the_records_are_no_records() -> None:
    records = some_records(3)
    data = build(records)
    _, start, seed = read_header(data)
    found = scan(data + bytes(4096), start, seed)
    assert found.messages == records
    assert found.damaged == bytes(4096)
    assert found.problem


def test_sequences_ascend_or_the_rest_is_not_believed() -> None:
    records = [BufferedMessage(1, b"i", b"a"), BufferedMessage(3, b"i", b"b"), BufferedMessage(2, b"i", b"c")]
    data = build(records)
    _, start, seed = read_header(data)
    found = scan(data, start, seed)
    assert found.messages == records[:2]
    assert found.problem == "sequence 2 does not follow 3"


def test_another_version_reports_it() -> None:
    data = bytearray(build([]))
    data[4] = 9
    data[9:13] = crc32(data[13:], crc32(data[:9])).to_bytes(4, "little")
    with pytest.raises(CorruptSegment, match="version 9, this release reads 1"):
        read_header(bytes(data))


def test_a_lane_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 4096 fit"):
        pack_header(FileHeader(PRODUCER, 0, "x" * (MAX_LANE + 1)))
