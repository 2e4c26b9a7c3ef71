"""Snapshots of the quarantine of a spill log: refused messages, and damaged files."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from celery_dq.errors import CorruptRecord, InvalidRequest
from celery_dq.private_files import read_file
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.segment import QuarantineContents, read_contents
from celery_dq.producer.spill_log import SpillLog
from celery_dq.transport.message_record import MessageRecord

__all__ = ["QuarantinedFile", "QuarantinedMessage", "quarantined_file", "quarantined_files"]


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


def _look_at(path: Path) -> QuarantinedFile:
    status = path.stat(follow_symlinks=False)
    try:
        contents = read_contents(read_file(path, is_trusted=False))
    except OSError as error:
        contents = QuarantineContents("", (), str(error.strerror or error), b"")
    at = datetime.fromtimestamp(status.st_mtime, timezone.utc)
    queue = contents.destination.partition("/")[2] if contents.destination.startswith("p") else ""
    described = tuple(_described(queue, each) for each in contents.messages)
    return QuarantinedFile(path.name, path, status.st_size, at, described, contents.problem)


def _described(queue: str, message: BufferedMessage) -> QuarantinedMessage:
    task = tenant = ""
    if queue:
        with suppress(CorruptRecord):
            record = MessageRecord.unpack(message.payload)
            task, tenant = record.task, record.tenant
    return QuarantinedMessage(
        message.id.decode("utf-8", "replace"), queue, task, tenant, len(message.payload)
    )
