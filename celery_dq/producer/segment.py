"""The bytes of one file of the spill log: a header, then records. Pure.

Little-endian::

    header    "DQSG"  version u8  length u32  crc u32  |  producer (16 bytes)  number u64  lane (utf-8)
    record    length u32  crc u32  sequence u64  flags u8  |  payload

``length`` counts what follows the bar. The header's CRC covers everything but itself. A record's covers its
length, sequence, flags and payload, and starts from the CRC of the header, so that a block of another file,
which a file system may leave after a power cut, is no valid record here.

A segment holds one lane, and its sequences ascend. What is read is the longest valid prefix: from the first
byte that is not as it was written, nothing is believed.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from celery_dq.errors import CorruptSegment

__all__ = ["Header", "Record", "Scan", "pack_header", "pack_record", "read_header", "scan"]

MAGIC = b"DQSG"
VERSION = 1
_FIXED = struct.Struct("<4sBI")
_CRC = struct.Struct("<I")
_IDENTITY = struct.Struct("<16sQ")
_HEADER_START = _FIXED.size + _CRC.size

_COVERED = struct.Struct("<IQB")  # of a record's head, what the CRC covers
_HEAD = struct.Struct("<IIQB")
HEAD_SIZE = _HEAD.size

#: Longest lane in a header and longest payload of a record, in bytes: a length beyond it is damage.
MAX_LANE = 4_096
MAX_PAYLOAD = 512 * 1024 * 1024


class Header(NamedTuple):
    """Whose segment it is.

    :param producer: 16 bytes, who numbers the records: one process, one buffer.
    :param number: of the segment among those of the producer; ascending.
    :param lane: where its records go.
    """

    producer: bytes
    number: int
    lane: str


class Record(NamedTuple):
    """One message of a segment, as it was appended."""

    sequence: int
    flags: int
    payload: bytes


class Scan(NamedTuple):
    """What could be read.

    :param records: the longest valid prefix.
    :param end: offset behind it.
    :param problem: why it ends there, "" at the end of the data.
    """

    records: list[Record]
    end: int
    problem: str


def pack_header(header: Header) -> tuple[bytes, int]:
    """The first bytes of a segment, and the seed of its records' checksums."""
    lane = header.lane.encode()
    if len(lane) > MAX_LANE:
        raise ValueError(f"a lane has {len(lane)} bytes, at most {MAX_LANE} fit: {header.lane[:60]!r}…")
    rest = _IDENTITY.pack(header.producer, header.number) + lane
    fixed = _FIXED.pack(MAGIC, VERSION, len(rest))
    seed = crc32(rest, crc32(fixed))
    return fixed + _CRC.pack(seed) + rest, seed


def read_header(data: bytes) -> tuple[Header, int, int]:
    """The header at the start of `data`, the offset behind it, and the seed of the checksums.

    Raises:
        CorruptSegment: It is cut short, damaged, of another version, or no segment at all.
    """
    if len(data) < _HEADER_START:
        raise CorruptSegment(f"the header is cut short: {len(data)} bytes")
    magic, version, length = _FIXED.unpack_from(data)
    end = _HEADER_START + length
    if magic != MAGIC or not _IDENTITY.size <= length <= _IDENTITY.size + MAX_LANE or len(data) < end:
        raise CorruptSegment("this is no segment, or its header is cut short")
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
    return Header(producer, number, lane), end, seed


def pack_record(sequence: int, flags: int, payload: bytes, seed: int) -> bytes:
    """One record, to be appended to the segment with this seed."""
    length = len(payload)
    crc = crc32(payload, crc32(_COVERED.pack(length, sequence, flags), seed))
    return _HEAD.pack(length, crc, sequence, flags) + payload


def scan(data: bytes, start: int, seed: int, after: int = -1) -> Scan:
    """The records from offset `start`.

    :param after: the sequence that all must exceed.
    """
    records: list[Record] = []
    at, size, view = start, len(data), memoryview(data)
    while at < size:
        if size - at < HEAD_SIZE:
            return Scan(records, at, "a record's head is cut short")
        length, crc, sequence, flags = _HEAD.unpack_from(data, at)
        end = at + HEAD_SIZE + length
        if length > MAX_PAYLOAD or end > size:
            return Scan(records, at, "a record is cut short, or its length is damaged")
        payload = view[at + HEAD_SIZE : end]
        if crc32(payload, crc32(_COVERED.pack(length, sequence, flags), seed)) != crc:
            return Scan(records, at, "the checksum of a record is wrong")
        if sequence <= after:
            return Scan(records, at, f"sequence {sequence} does not follow {after}")
        records.append(Record(sequence, flags, bytes(payload)))
        after = sequence
        at = end
    return Scan(records, at, "")
