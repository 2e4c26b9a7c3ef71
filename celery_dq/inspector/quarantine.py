"""Snapshots of the quarantine of a spill log: refused messages, and damaged files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from celery_dq.errors import CorruptRecord, CorruptSegment, InvalidRequest
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.segment import read_header, scan
from celery_dq.producer.spill_log import SpillLog
from celery_dq.transport.redis.store.record import RedisRecord

__all__ = ["QuarantinedFile", "QuarantinedMessage", "quarantined_file", "quarantined_files", "read_messages"]


@dataclass(frozen=True)
class QuarantinedMessage:
    """A message in the quarantine.

    Attributes:
        id: The task id.
        queue: Name of the queue; "" for a message to another broker.
        task: Name of the task; "" when it is not known.
        tenant: The tenant; "" when it is not known.
        bytes: Size of the packed message.
    """

    id: str
    queue: str
    task: str
    tenant: str
    bytes: int


@dataclass(frozen=True)
class QuarantinedFile:
    """A file in the quarantine.

    Attributes:
        name: Name of the file.
        path: Its path.
        bytes: Its size.
        at: Its last change.
        messages: The messages that can be read.
        problem: Why the rest cannot be read; "" when all of the file can.
    """

    name: str
    path: Path
    bytes: int
    at: datetime
    messages: tuple[QuarantinedMessage, ...]
    problem: str


def quarantined_files(folder: Path | None) -> list[QuarantinedFile]:
    """Read all files in the quarantine of a spill log, the oldest first. None has no files."""
    found = []
    for path in () if folder is None else SpillLog(folder).quarantined_files():
        with suppress(FileNotFoundError):  # another process has removed it
            found.append(_look_at(path))
    return sorted(found, key=lambda each: each.at)


def quarantined_file(folder: Path | None, name: str) -> QuarantinedFile:
    """Return the file of a name.

    Raises:
        InvalidRequest: There is none.
    """
    for each in quarantined_files(folder):
        if each.name == name:
            return each
    raise InvalidRequest(
        f"No file {name!r} is in the quarantine; 'celery dq spill quarantine list' shows all"
    )


def read_messages(data: bytes) -> tuple[str, Sequence[BufferedMessage], str]:
    """Return the lane of a file, its readable messages, and why the rest cannot be read."""
    try:
        header, start, seed = read_header(data)
    except CorruptSegment as exc:
        return "", (), str(exc)
    found = scan(data, start, seed)
    messages = []
    for sequence, _, payload in found.records:
        end = 1 + payload[0]
        messages.append(BufferedMessage(sequence, payload[1:end], payload[end:]))
    return header.lane, messages, found.problem


def _look_at(path: Path) -> QuarantinedFile:
    data, status = path.read_bytes(), path.stat()
    lane, messages, problem = read_messages(data)
    at = datetime.fromtimestamp(status.st_mtime, timezone.utc)
    described = tuple(_described(lane, each) for each in messages)
    return QuarantinedFile(path.name, path, len(data), at, described, problem)


def _described(lane: str, message: BufferedMessage) -> QuarantinedMessage:
    queue = lane.partition("/")[2] if lane.startswith("p") else ""
    task = tenant = ""
    if queue:
        with suppress(CorruptRecord):
            record = RedisRecord.unpack(message.payload)
            task, tenant = record.task, record.tenant
    return QuarantinedMessage(
        message.id.decode("utf-8", "replace"), queue, task, tenant, len(message.payload)
    )
