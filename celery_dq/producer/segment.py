"""The bytes of one file of the spill log: a header, then records. Pure.

Little-endian::

    header    "DQSG"  version u8  length u32  crc u32  |  producer (16 bytes)  number u64  lane (utf-8)
    record    length u32  crc u32  sequence u64  id length u8  |  id  payload

``length`` counts the bytes after the bar. The CRC of the header covers all of the header except itself. The
CRC of a record covers all of the record except itself, and starts from the CRC of the header. A block of
another file, which a file system may leave after a power cut, is therefore no valid record.

A segment holds records of one lane, with ascending sequences. A reader steps over damaged bytes to the next
valid record, and restores a header in which a single byte is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

from celery_dq.errors import CorruptSegment
from celery_dq.producer.buffer import BufferedMessage

MAGIC = b"DQSG"
VERSION = 1
_FIXED = struct.Struct("<4sBI")
_CRC = struct.Struct("<I")
_IDENTITY = struct.Struct("<16sQ")
_HEADER_START = _FIXED.size + _CRC.size

_COVERED = struct.Struct("<IQB")  # the part of a record's head that the CRC covers
_HEAD = struct.Struct("<IIQB")
HEAD_SIZE = _HEAD.size
#: The upper bytes of each sequence, and their place in the head of a record: a mark to search for records.
_UPPER, _UPPER_AT = b"\0\0", 14

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


class SegmentScan(NamedTuple):
    """The result of reading a segment.

    Attributes:
        messages: The messages of the valid records.
        damaged: The bytes between and after them.
        problem: Why the first of these bytes are not a record; "" when there are none.
        missing: Number of records in these bytes, as far as the sequences around them show it; at least one
            for each part.
    """

    messages: list[BufferedMessage]
    damaged: bytes
    problem: str
    missing: int


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
    try:
        return _parse_header(data)
    except CorruptSegment:
        for candidate in _with_one_byte_changed(data):
            with suppress(CorruptSegment):
                return _parse_header(candidate)
        raise


def _with_one_byte_changed(data: bytes) -> Iterator[bytearray]:
    head = bytearray(data[: _HEADER_START + _IDENTITY.size + MAX_LANE])
    length = _FIXED.unpack_from(head)[2] if len(head) >= _HEADER_START else 0
    size = _HEADER_START + (length if length <= _IDENTITY.size + MAX_LANE else 0)
    for place, intact in enumerate(head[:size]):
        for value in range(256):
            head[place] = value
            yield head
        head[place] = intact


def _parse_header(data: bytes | bytearray) -> tuple[FileHeader, int, int]:
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


def pack_record(message: BufferedMessage, seed: int) -> bytes:
    """Return the record of a message for the segment with this seed."""
    sequence, message_id, payload = message
    rest = message_id + payload
    crc = crc32(rest, crc32(_COVERED.pack(len(rest), sequence, len(message_id)), seed))
    return _HEAD.pack(len(rest), crc, sequence, len(message_id)) + rest


def scan(data: bytes, start: int, seed: int) -> SegmentScan:
    """Read the records from offset `start` on, and step over damaged bytes.

    Args:
        data: Bytes of the segment.
        start: Offset of the first record.
        seed: Seed of the checksums, from the header.
    """
    messages: list[BufferedMessage] = []
    damaged: list[bytes] = []
    problem, missing = "", 0
    at, size, after = start, len(data), -1
    while at < size:
        record = _read_record(data, at, seed, after)
        if isinstance(record, str):
            problem = problem or record
            begin, at = at, _find_record(data, at + 1, seed, after)
            damaged.append(data[begin:at])
            found = _read_record(data, at, seed, after)
            missing += 1 if isinstance(found, str) or after < 0 else max(found.sequence - after - 1, 1)
            continue
        messages.append(record)
        after = record.sequence
        at += HEAD_SIZE + len(record.id) + len(record.payload)
    return SegmentScan(messages, b"".join(damaged), problem, missing)


def _read_record(data: bytes, at: int, seed: int, after: int) -> BufferedMessage | str:
    """Return the message of the record at an offset, or the reason why there is none."""
    if len(data) - at < HEAD_SIZE:
        return "a record's head is cut short"
    length, crc, sequence, id_size = _HEAD.unpack_from(data, at)
    end = at + HEAD_SIZE + length
    if length > MAX_PAYLOAD or end > len(data):
        return "a record is cut short, or its length is damaged"
    if sequence <= after:
        return f"sequence {sequence} does not follow {after}"
    rest = data[at + HEAD_SIZE : end]
    if crc32(rest, crc32(_COVERED.pack(length, sequence, id_size), seed)) != crc:
        return "the checksum of a record is wrong"
    return BufferedMessage(sequence, rest[:id_size], rest[id_size:])


def _find_record(data: bytes, at: int, seed: int, after: int) -> int:
    """Return the offset of the first valid record at `at` or behind it; the end of the data without one."""
    while (mark := data.find(_UPPER, at + _UPPER_AT)) >= 0:
        at = mark - _UPPER_AT
        if not isinstance(_read_record(data, at, seed, after), str):
            return at
        at += 1
    return len(data)


class QuarantineContents(NamedTuple):
    """The readable messages of a file of the quarantine, and the reason why the rest cannot be read.

    Attributes:
        destination: Lane of the messages, as the sender takes it; "" when the file has no header.
        messages: The readable messages, in order.
        problem: Why the rest cannot be read; "" when all of the file can.
        rest: A file with the rest; b"" when there is none.
    """

    destination: str
    messages: Sequence[BufferedMessage]
    problem: str
    rest: bytes


def read_contents(data: bytes) -> QuarantineContents:
    """Read the bytes of a file of the quarantine, as far as possible."""
    try:
        header, start, seed = read_header(data)
    except CorruptSegment as exc:
        return QuarantineContents("", (), str(exc), data)
    found = scan(data, start, seed)
    rest = pack_header(header)[0] + found.damaged if found.problem else b""
    return QuarantineContents(header.lane, found.messages, found.problem, rest)
