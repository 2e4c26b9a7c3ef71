"""The bytes of one file of the spill log: a header, then records. Pure.

Little-endian::

    header    "DQSG"  version u8  length u32  crc u32  |  producer (16 bytes)  number u64  lane (utf-8)
    record    length u32  crc u32  sequence u64  flags u8  |  payload

``length`` counts the bytes after the bar. The CRC of the header covers all of the header except itself. The
CRC of a record covers its length, sequence, flags and payload, and starts from the CRC of the header. A block
of another file, which a file system may leave after a power cut, is therefore no valid record.

A segment holds records of one lane, with ascending sequences. A reader uses the longest valid prefix and
ignores all bytes from the first damaged record on.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from celery_dq.errors import CorruptSegment

__all__ = ["FileHeader", "SegmentRecord", "SegmentScan", "pack_header", "pack_record", "read_header", "scan"]

MAGIC = b"DQSG"
VERSION = 1
_FIXED = struct.Struct("<4sBI")
_CRC = struct.Struct("<I")
_IDENTITY = struct.Struct("<16sQ")
_HEADER_START = _FIXED.size + _CRC.size

_COVERED = struct.Struct("<IQB")  # the part of a record's head that the CRC covers
_HEAD = struct.Struct("<IIQB")
HEAD_SIZE = _HEAD.size

#: Longest lane in a header and longest payload of a record, in bytes. A larger length means damage.
MAX_LANE = 4_096
MAX_PAYLOAD = 512 * 1024 * 1024


class FileHeader(NamedTuple):
    """The identity of a segment.

    Attributes:
        producer: Producer sequence that numbers the records, 16 bytes: one lane of one buffer.
        number: Number of the segment, ascending within the producer sequence.
        lane: Destination of the records.
    """

    producer: bytes
    number: int
    lane: str


class SegmentRecord(NamedTuple):
    """One message of a segment, as it was appended."""

    sequence: int
    flags: int
    payload: bytes


class SegmentScan(NamedTuple):
    """The result of reading a segment.

    Attributes:
        records: The longest valid prefix.
        end: Offset of the first byte after the prefix.
        problem: Why the prefix ends there; "" at the end of the data.
    """

    records: list[SegmentRecord]
    end: int
    problem: str


def pack_header(header: FileHeader) -> tuple[bytes, int]:
    """Return the first bytes of a segment, and the seed of its records' checksums.

    Raises:
        ValueError: The lane is longer than `MAX_LANE`.
    """
    lane = header.lane.encode()
    if len(lane) > MAX_LANE:
        raise ValueError(f"a lane has {len(lane)} bytes, at most {MAX_LANE} fit: {header.lane[:60]!r}…")
    rest = _IDENTITY.pack(header.producer, header.number) + lane
    fixed = _FIXED.pack(MAGIC, VERSION, len(rest))
    seed = crc32(rest, crc32(fixed))
    return fixed + _CRC.pack(seed) + rest, seed


def read_header(data: bytes) -> tuple[FileHeader, int, int]:
    """Return the header at the start of `data`, the offset after it, and the seed of the checksums.

    Raises:
        CorruptSegment: The header is cut short, damaged, of another version, or not a header of a segment.
    """
    if len(data) < _HEADER_START:
        raise CorruptSegment(f"the header is cut short: {len(data)} bytes")
    magic, version, length = _FIXED.unpack_from(data)
    end = _HEADER_START + length
    if magic != MAGIC or not _IDENTITY.size <= length <= _IDENTITY.size + MAX_LANE or len(data) < end:
        raise CorruptSegment("the file is not a segment, or its header is cut short")
    rest = data[_HEADER_START:end]
    seed = crc32(rest, crc32(data[: _FIXED.size]))
    if _CRC.unpack_from(data, _FIXED.size)[0] != seed:
        raise CorruptSegment("the checksum of the header is wrong")
    if version != VERSION:
        raise CorruptSegment(f"the segment has version {version}, this release reads {VERSION}")
    producer, number = _IDENTITY.unpack_from(rest)
    try:
        lane = rest[_IDENTITY.size :].decode()
    except UnicodeDecodeError as error:
        raise CorruptSegment(f"the lane is not UTF-8: {error}") from None
    return FileHeader(producer, number, lane), end, seed


def pack_record(sequence: int, flags: int, payload: bytes, seed: int) -> bytes:
    """Return the bytes of one record for the segment with this seed."""
    length = len(payload)
    crc = crc32(payload, crc32(_COVERED.pack(length, sequence, flags), seed))
    return _HEAD.pack(length, crc, sequence, flags) + payload


def scan(data: bytes, start: int, seed: int, after: int = -1) -> SegmentScan:
    """Read the records from offset `start` on.

    Args:
        data: Bytes of the segment.
        start: Offset of the first record.
        seed: Seed of the checksums, from the header.
        after: Sequence that the first record must exceed.
    """
    records: list[SegmentRecord] = []
    at, size, view = start, len(data), memoryview(data)
    while at < size:
        if size - at < HEAD_SIZE:
            return SegmentScan(records, at, "a record's head is cut short")
        length, crc, sequence, flags = _HEAD.unpack_from(data, at)
        end = at + HEAD_SIZE + length
        if length > MAX_PAYLOAD or end > size:
            return SegmentScan(records, at, "a record is cut short, or its length is damaged")
        payload = view[at + HEAD_SIZE : end]
        if crc32(payload, crc32(_COVERED.pack(length, sequence, flags), seed)) != crc:
            return SegmentScan(records, at, "the checksum of a record is wrong")
        if sequence <= after:
            return SegmentScan(records, at, f"sequence {sequence} does not follow {after}")
        records.append(SegmentRecord(sequence, flags, bytes(payload)))
        after = sequence
        at = end
    return SegmentScan(records, at, "")
