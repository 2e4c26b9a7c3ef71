"""Snapshots of the spill log, including the files of other processes, and of its quarantine.

Lock files are never opened, because opening and closing the lock file of this process would end its lock. The
name of a folder shows whether its process lives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, TypeAlias

from celery_dq.errors import CorruptRecord, CorruptSegment, InvalidRequest
from celery_dq.private_files import read_file
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.segment import QuarantineContents, read_contents, read_header, scan
from celery_dq.producer.spill_log import SUFFIX, FolderLock, SpillLog, process_name
from celery_dq.transport.message_record import MessageRecord

OwnerState: TypeAlias = Literal["this process", "alive", "dead", "elsewhere"]


@dataclass(frozen=True)
class Owner:
    """The folder of one process.

    Attributes:
        name: Name of the folder.
        state: State of its process; ``elsewhere`` means another machine or container. The messages of a dead
            process are sent by another process of the app, or by ``celery dq spill replay``.
        pending: Number of messages in its files. All messages of a file count until its last one is
            delivered.
        bytes: Size of its files.
        age_s: Seconds since the last write to its oldest file.
        damaged: Number of files that cannot be read to their end.
    """

    name: str
    state: OwnerState
    pending: int
    bytes: int
    age_s: float
    damaged: int


@dataclass(frozen=True)
class Spill:
    """The spill log of an app.

    Attributes:
        folder: Path of the folder; None when messages are in memory only.
        pending: Number of messages in it.
        bytes: Size of the files of all processes.
        age_s: Seconds since the last write to the oldest file.
        owners: The folders of the processes.
        quarantined: Files with damaged or refused messages.
    """

    folder: Path | None
    pending: int
    bytes: int
    age_s: float
    owners: tuple[Owner, ...]
    quarantined: tuple[Path, ...]


@dataclass(frozen=True)
class SpillFiles:
    """The sizes and times of the files of a spill log.

    Attributes:
        bytes: Size of the files of all processes.
        age_s: Seconds since the last write to the oldest file; 0 without files.
        quarantined: Number of files with damaged or refused messages.
    """

    bytes: int
    age_s: float
    quarantined: int


def spill_files(folder: Path) -> SpillFiles:
    """Look at the files below `folder` without reading them."""
    log = SpillLog(folder)
    size, oldest = 0, time.time()
    now = oldest
    for owner in log.owners():
        for path in (folder / owner).glob(f"*{SUFFIX}"):
            with suppress(OSError):  # its messages were delivered meanwhile
                status = path.stat()
                size, oldest = size + status.st_size, min(oldest, status.st_mtime)
    return SpillFiles(size, max(now - oldest, 0.0), len(log.quarantined_files()))


def survey(folder: Path | None) -> Spill:
    """Read all files below `folder` and count their messages. None has no files."""
    if folder is None:
        return Spill(None, 0, 0, 0.0, (), ())
    log = SpillLog(folder)
    owners = tuple(_look_at(folder / name) for name in log.owners())
    return Spill(
        folder,
        sum(owner.pending for owner in owners),
        sum(owner.bytes for owner in owners),
        max((owner.age_s for owner in owners), default=0.0),
        owners,
        tuple(log.quarantined_files()),
    )


def _look_at(folder: Path) -> Owner:
    pending = size = damaged = 0
    oldest = now = time.time()
    for data, written_at in _files(folder):
        size += len(data)
        try:
            _, start, seed = read_header(data)
        except CorruptSegment:
            damaged += bool(data)
            continue
        found = scan(data, start, seed)
        if found.messages:
            pending += len(found.messages)
            oldest = min(oldest, written_at)
        # A file that is being written may end with an incomplete record, which counts as damage for a moment.
        damaged += bool(found.problem)
    return Owner(folder.name, _state_of(folder), pending, size, max(now - oldest, 0.0), damaged)


def _files(folder: Path) -> Iterator[tuple[bytes, float]]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(OSError):  # its messages were delivered meanwhile
            yield read_file(path, is_trusted=False), path.stat().st_mtime


def _state_of(folder: Path) -> OwnerState:
    with suppress(OSError):
        if FolderLock.is_own(folder.stat(follow_symlinks=False)):
            return "this process"
    process = folder.name.partition("-")[0]
    ours = process_name()
    if process == ours:
        return "dead"  # an earlier process of this container had the same pid and start time
    pid, _, rest = process.partition(".")
    started, _, host = rest.rpartition(".")
    if host != ours.rpartition(".")[2] or not pid.isdecimal():
        return "elsewhere"
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return "dead"
    except OSError:
        pass  # the process exists, and belongs to another user
    with suppress(OSError, IndexError):
        # Another process may have got the same pid since then.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[19] != started or fields[0] in "ZX":
            return "dead"
    return "alive"


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
            found.append(_look_into(path))
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


def _look_into(path: Path) -> QuarantinedFile:
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
